"""Comparison: what differs between two checkpoints, each merged from its whole chain.

- ``compare``: ``compare``, which finds tensors that were added, removed, reshaped or changed, and the rows that differ.
- ``row_distance``: how far the differing rows moved.

Words of this package:

- *movement*: the norm of the difference of a row, divided by the norm of the row before.
"""
