"""Benchmarks of tracking.

- ``modified``: rows that training modifies.
- ``tracker``: what tracking adds to a training step.
"""
