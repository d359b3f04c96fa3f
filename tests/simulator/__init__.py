"""Simulation: the real planner, writer, reader and tracker, run by one scheduler with a seed.

- ``engine``: the scheduler, and what the library finds in place of threads, clocks, process groups and the store.
- ``tasks``: what the scheduler runs: jobs with their ranks, their supervisors, and the processes beside them.
- ``world``: a schedule, from its seed to its end.
- ``checks``: the invariants that must hold then; ``managed_checks`` those of managed jobs.
- ``managed_family``: draws jobs that save by a ``CheckpointManager``.
- ``shrinking``: smaller schedules with the same finding, and the report.
- ``command``: what tests run of it.
- ``mutants``: ways to break the protocol, which must be found.
"""
