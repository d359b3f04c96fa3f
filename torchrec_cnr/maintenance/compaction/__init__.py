"""Compaction: merges a checkpoint chain, or its newest deltas, into one checkpoint, and copies as few bytes as pays.

The merged checkpoint gets a second manifest, which replaces the first one. Most data files stay as they are. Files with
many overwritten rows are rewritten: their live rows are copied, without decoding, into new files. Nothing is removed;
pruning does that.

- ``plan``: ``plan_compaction``, which chooses the data files to rewrite by benefit and cost.
- ``flatten``: a run of checkpoints as if one checkpoint had stored all of it.
- ``live_rows``: which stored rows a load still sees, from row numbers alone.
- ``compact``: ``compact`` and ``run_compaction``, which copy the rows, then write and commit the new manifest.
- ``copy_rows``: goes through the tables, a range of rows at a time, and copies the live rows.
- ``row_groups``: copies rows that belong together (one box, scheme and age) into new blocks.
- ``new_packs``: the new data files, each with rows of one heat and about one age.

Words of this package:

- *live*, *dead*: a stored row that a load still sees, or that a newer checkpoint has overwritten.
- *victim*: a data file that the new manifest does not use; its live rows are copied.
- *moved*: copied without decoding.
- *piece*: one block of rows of the merged checkpoints.
- *window*: the range of rows of a table that is worked on at a time.
- *heat*: how often rows were modified lately, from 0 to 3. Rows that are likely to be overwritten soon lie together.
"""
