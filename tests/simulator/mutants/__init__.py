"""Ways to break the protocol, each of which the simulator must find: ``python -m tests.simulator.mutants``.

- ``replacing``: a mutant replaces a function or two of the library while schedules run.
- ``of_saves``: mutants of saves, restores and commits.
- ``of_manager``: mutants of managers, their maintenance and their restores.
- ``of_upkeep``: mutants of leases, pruning and compaction.
"""
