"""Benchmarks on a CUDA device. Without one, they report that, or with ``--quick`` run on the CPU.

- ``gpu_kernels``: encoding and decoding, relative to FBGEMM's operators and to a copy.
- ``gpu_loads``: loads into device memory, and updates of a served model.
- ``gpu_marking``: time that tracking adds to a training step.
- ``gpu_stall``: stall of training in asynchronous saves.
"""
