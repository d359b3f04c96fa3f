"""Estimates, before there is a checkpoint: bytes, bandwidth, disk and memory of a model's checkpoints.

An estimate is a pure function of its inputs, and reads no files. It takes layouts and limits from the packages that
save. Only what depends on the values of rows is a constant here: the size of compressed bytes, how many rows several
intervals modify, and how much a compaction copies.

- ``inputs``: the tables of a model, and how its checkpoints are saved.
- ``checkpoint_bytes``: the bytes of a baseline and of a delta, by kind, and the number of their data files.
- ``runs``: the bytes that a policy writes, keeps and reads over a run.
- ``rank_memory``: the memory of a rank for the tracker and for saves.
- ``estimate``: puts these together, with the same figures of plain DCP.
"""
