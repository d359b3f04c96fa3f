"""Jobs to measure.

- ``async_saves``: asynchronous saves, ours and DCP's.
- ``policy_runs``: runs of many checkpoints under a policy.
- ``restored_runs``: training that is restored from quantized checkpoints.
- ``save_methods``: methods to save and restore a model, ours and others.
- ``simulated_ranks``: the saves of many ranks in one process.
- ``table_models``: TorchRec tables, sharded and trained as in a job.
"""
