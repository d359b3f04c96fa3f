"""Jobs to measure.

- ``async_saves``: asynchronous saves, by this library and by DCP.
- ``example_training``: the model and the clicks of the example.
- ``frequent_saves``: the example's training with a save every second.
- ``killed_job``: the example with local checkpoints, which is killed and started again.
- ``large_save``: a save of one large table, in a process of its own.
- ``policy_runs``: runs of many checkpoints under a policy.
- ``preempted_job``: a job on several ranks that a signal stops.
- ``restored_runs``: training that is restored from quantized checkpoints.
- ``restoring_job``: a job on several ranks that restores from a slow store and local copies.
- ``save_methods``: methods to save and restore a model, by this library and others.
- ``simulated_ranks``: the saves of many ranks in one process.
- ``table_models``: TorchRec tables, sharded and trained as in a job.
- ``zch_models``: a TorchRec table with zero-collision hashing.
"""
