"""``CheckpointManager``: one object for the checkpoints of a run. All that it does is available as functions, too.

- ``manager``: ``CheckpointManager``, which calls ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` and starts
  maintenance.
- ``schedule``: when a checkpoint is due, by steps or by seconds, at the same step on all ranks.
- ``restore``: ``restore_newest``, which loads the newest checkpoint that can be read, the same one on all ranks.
- ``continuation``: the checkpoint that a run continues from, and the names and checkpoints behind it.
- ``preemption``: ``Preemption``, after whose signals all ranks save at the same step and the job stops.
- ``background``: ``Background``, the settings of background saves and compaction.
- ``callbacks``: calls the user's callbacks, and logs and counts the exceptions that they raise.
- ``open_roots``: ensures that this process has at most one manager for each root.
- ``local_checkpoints``: ``LocalCheckpoints``, frequent checkpoints on a disk of the host, and when they are restored.
- ``unused_copies``: removes local copies that the newest checkpoint does not need.
- ``ranks``: the process groups of a run, and the heartbeat that names a rank which no longer responds.
- ``reader_state``: ``ReaderState``, which saves the data loader state that belongs to the last trained batch.
- ``param_groups``: ``ParamGroups``, which saves the hyperparameters of TorchRec's optimizers.
- ``random_state``: ``RandomState``, which saves the random number generators of each rank.
"""
