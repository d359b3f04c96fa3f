"""``CheckpointManager``: one object for the checkpoints of a run. It does nothing that a function cannot do.

- ``manager``: ``CheckpointManager``, which calls ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` and starts
  maintenance.
- ``schedule``: when a checkpoint is due, by steps or by seconds, at the same step on all ranks.
- ``restore``: ``restore_newest``, which loads the newest checkpoint that can be read, the same one on all ranks.
- ``background``: ``Background``, what the work beside training may take.
- ``callbacks``: calls the user's callbacks; what they raise is logged and counted.
- ``open_roots``: the roots that this process has a manager for: one each.
- ``ranks``: the process groups of a run, and the heartbeat that names a rank which no longer responds.
- ``reader_state``: ``ReaderState``, which saves the data loader state that belongs to the last trained batch.
"""
