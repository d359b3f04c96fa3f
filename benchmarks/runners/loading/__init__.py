"""Benchmarks of what reads checkpoints.

- ``integrity``: the part of a load that digests take.
- ``reading``: bytes read for one table, or a range of its rows.
- ``serving``: lag of a model that follows a job.
"""
