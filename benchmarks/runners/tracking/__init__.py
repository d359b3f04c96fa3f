"""Benchmarks of tracking.

- ``modified``: rows that training modifies.
- ``tracker``: time that tracking adds to a training step.
"""
