"""Benchmarks of runs of many checkpoints.

- ``bandwidth``: bytes written and kept, by policy and width.
- ``compaction``: speed and memory of compaction.
- ``policies``: bytes written, kept and restored over 2,000 checkpoints.
"""
