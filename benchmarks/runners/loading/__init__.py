"""Benchmarks of reading checkpoints.

- ``integrity``: share of a load's time that the verification of digests takes.
- ``kills``: training lost when all ranks are killed at random moments.
- ``local_copies``: restores from a slow store, after a rank has lost its local copies.
- ``reading``: bytes read for one table, or a range of its rows.
- ``serving``: lag of online model updates.
"""
