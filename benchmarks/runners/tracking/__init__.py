"""Benchmarks of tracking.

- ``modified``: rows that training modifies.
- ``tracker``: time that tracking adds to a training step.
- ``zch``: size of a delta with zero-collision hashing, which has an id map.
"""
