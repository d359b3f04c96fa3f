"""Kernels for GPUs, in Triton. They write the same bytes as the kernels for CPUs.

- ``fused_rows``: encodes rows with uniform codes, and decodes them.
- ``mark_rows``: marks the rows that a lookup reads.
- ``pinned_memory``: host memory that GPUs copy to directly, freed with its last tensor.
- ``range_search``: searches the range of 32 rows at a time, one in each lane of a warp.

Terms of this package:

- *tile*: a transposed copy of some rows in global memory, small enough to stay in the cache.
"""
