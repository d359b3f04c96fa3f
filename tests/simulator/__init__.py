"""Simulation: the real planner, writer, reader and tracker, run by one scheduler with a seed.

- ``scheduler``: tasks, of which one runs at a time; logical time; decisions that a seed makes and that can be undone.
- ``virtual``: threads, locks, clocks and random values, as the library finds them in a simulation.
- ``collectives``: process groups of simulated ranks.
- ``installing``: puts both in the place of the real ones.
- ``storage``: an object store in memory, with faults.
- ``models``: the tiny model that ranks train, and the memory of it that checkpoints are compared with.
- ``jobs``: what ranks of a job do, and what is remembered of their saves.
- ``ranks``: ranks that restore, train and save, and ``supervisors``, which start them again.
- ``upkeep``: processes that compact, prune and read beside the jobs.
- ``world``: a schedule, from its seed to its end.
- ``checks``: the invariants that must hold then.
- ``shrinking``: smaller schedules with the same finding, and the report.
- ``command``: what tests run of it.
- ``mutants``, ``mutants_of_upkeep``: ways to break the protocol, which must be found.
"""
