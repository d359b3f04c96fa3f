"""Kernels for GPUs, in Triton. They write the same bytes as the kernels for CPUs, except where ``row_transform`` says.

- ``fused_rows``: encodes rows with uniform codes, and decodes them.
- ``mark_rows``: marks the rows that a lookup reads.
- ``pinned_memory``: host memory that GPUs copy to directly, freed with its last tensor.
- ``range_search``: searches the range of 32 rows at a time, one in each lane of a warp.
- ``row_transform``: rows as multiples of a step in an orthonormal basis, in operations of PyTorch.

Terms of this package:

- *tile*: a transposed copy of some rows in global memory, small enough to stay in the cache.
"""
