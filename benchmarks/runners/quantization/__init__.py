"""Benchmarks of quantization.

- ``accuracy``: what restores from quantized checkpoints cost a model.
- ``coding``: speed of uniform quantization and of k-means.
- ``error``: error of every scheme and width.
- ``gpu``: speed of the CUDA kernels.
- ``movement``: how far rows move between checkpoints.
- ``search``: error and speed of adaptive quantization.
"""
