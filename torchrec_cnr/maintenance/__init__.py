"""Maintenance of committed checkpoints. Needs neither TorchRec nor a model.

A compaction or a prune is planned first, so that the plan can be printed before it is executed.

- ``catalog``: reads what a root contains, once: checkpoints, what cannot be read, and other files.
- ``file_names``: which files of a directory are ours, by their names, and in which order they may be removed.
- ``tags_and_metrics``: metrics and tags of a checkpoint, small files next to its manifest.
- ``execute``: ``execute``, which executes a compaction plan or a prune plan.
- ``compaction/``: merges a checkpoint chain, or its newest deltas, into one checkpoint.
- ``pruning/``: retention rules, and the removal of checkpoints that need not be kept.
- ``background_upkeep``: the maintenance thread of a manager, which compacts and prunes after each commit.
- ``verification/``: finds corrupt or missing bytes of a checkpoint chain.
- ``comparison/``: finds what differs between two checkpoints.
- ``export/``: writes a checkpoint as plain files: safetensors, ``torch.save`` or DCP's own format.
- ``dcp_import/``: makes a baseline of a checkpoint in DCP's own format.
- ``single_process_save``: a save by one process that acts as all ranks; used by exports and imports.
- ``restore_bytes``: the bytes that a restore of a checkpoint reads, from manifests alone.
- ``run_history``: what happened under a root, as a value: saves, compactions, prunes, bytes stored.
- ``read_run_history``: builds a run history from the manifests and the journal.

Words of this package:

- *annotation*: a file that holds metrics or a tag.
- *event*: a save, a compaction or a prune.
- *capacity*: the bytes stored under a root around an event.
- *model*: as a unit of size, one full checkpoint at the same quantization.
"""
