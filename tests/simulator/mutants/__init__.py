"""Ways to break the protocol, each of which the simulator must find: ``python -m tests.simulator.mutants``.

- ``replacing``: a mutant replaces a function or two of the library while schedules run.
- ``of_saves``: mutants of saves, restores and commits.
- ``of_disks``: mutants of what makes files on a local disk whole and durable.
- ``of_replicas``: mutants of two-dimensional parallel models.
- ``of_manager``: mutants of managers, their maintenance and their restores.
- ``of_upkeep``: mutants of leases, pruning and compaction.
- ``of_serving``: mutants of online model updates.
- ``of_processes``: mutants of clocks, of the end of the interpreter, and of what is left in a process.
"""
