"""The plug-ins for ``dcp.save`` and ``dcp.async_save``: decide what a checkpoint contains, copy, encode, write, commit.

The planner decides *what* is saved. The writer decides *how* and *where*. The docstrings of these two modules list the
calls of one save in order.

- ``planner``: ``CNRSavePlanner``, DCP's save planner: which rows are saved, and on which parent they are based.
- ``planned_save``: the planner's part of one save: its snapshot, its plan, and the coordinator's decision.
- ``running_saves``: which saves of this process are running. A save begins after the previous saves have ended.
- ``cut``: freezes the modified rows when a save begins, finds them in the state dict, and learns how the previous save
  ended.
- ``agreement``: what all ranks of a save must have in common, and the check that they do.
- ``decision``: what each rank reports to the coordinator, the check that replicas modified the same rows, and the
  decision for all ranks: baseline or delta, and of which parent.
- ``writer``: ``CNRStorageWriter``, DCP's storage writer and stager.
- ``staging``: what an asynchronous save copies before training continues, and the copy.
- ``staged_values``: the staging buffer, and rows that a GPU quantizes before they are copied to the host.
- ``plug_in_messages``: the objects that planner and writer send each other through DCP.
- ``rank_writer``: writes the items of one rank's plan, and records them for the coordinator.
- ``encoding``: chooses the quantization scheme of a shard by a sample of its rows, and encodes rows for data files, a
  block of rows at a time.
- ``sinks``: where the encoded rows of one rank are written: to files, to a Kafka topic, or to a compacted one.
- ``block_writer``: the sink of a compacted Kafka topic, where blocks that did not change are not written again.
- ``row_blocks``: the fixed row blocks of a compacted Kafka topic, and the keys under which they are stored.
- ``commit``: checks the records of all ranks against the plan, builds the manifest and writes it.

Terms of this package:

- *cut*: the consistent snapshot that a save captures: the set of modified rows is frozen, and the rows are located in
  the state dict.
- *pending*: a save whose outcome is not known yet. The next snapshot reads the outcome from the store.
- *blob*: a block of rows of one shard in a data file.
- *heat*: how many of the recent deltas contained a row, from 0 (cold) to 3 (hot). A block holds rows of one heat.
- *row mask*: which rows of a shard are saved; a table and its optimizer state share it.
- *row block*: a fixed range of rows of a shard, stored as a whole under one key of a compacted topic.
- *touched block*: a row block with a row that was modified since the latest checkpoint.
- *slot*: one of the keys of a row block. Two versions of a block can exist at a time, so that a failed save replaces
  nothing that is still needed.
"""
