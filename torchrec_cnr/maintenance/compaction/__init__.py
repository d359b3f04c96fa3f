"""Compaction: merges a checkpoint chain, or its newest deltas, into one checkpoint. It copies as little as necessary.

The merged checkpoint gets a second manifest, which replaces the first one. Most data files stay as they are. Files with
many overwritten rows are rewritten: their live rows are copied, without decoding, into new files. Nothing is removed;
pruning does that.

- ``plan``: ``plan_compaction``, which chooses the data files to rewrite by benefit and cost.
- ``live_rows``: the merged checkpoints as if one had stored all rows, and which of these a load still sees.
- ``copy_rows``: copies the live rows, a range of rows of a table at a time, into new shards and data files.
- ``compact``: ``compact`` and ``run_compaction``, which have the rows copied, then write and commit the new manifest.

Words of this package:

- *live*, *dead*: a stored row that a load still sees, or that a newer checkpoint has overwritten.
- *rewritten file*: a data file that the new manifest does not use; its live rows are copied.
- *moved*: copied without decoding.
- *piece*: one block of rows of the merged checkpoints.
- *window*: the range of rows of a table that is worked on at a time.
- *heat*: how often rows were modified lately, from 0 (cold) to 3 (hot). Rows of the same heat are in the same files.
"""
