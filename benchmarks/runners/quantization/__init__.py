"""Benchmarks of quantization.

- ``accuracy``: the loss of accuracy by restores from quantized checkpoints.
- ``coding``: speed of uniform quantization, of k-means, and of transform-coded rows.
- ``error``: error of every scheme and width.
- ``movement``: distances that rows move between checkpoints.
- ``search``: error and speed of adaptive quantization.
- ``transform_accuracy``: the accuracy after restores of transform-coded rows.
- ``transforms``: bytes of transform-coded checkpoints of trained tables.
"""
