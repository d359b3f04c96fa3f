"""Committed checkpoints, their chains back to the baseline, and the latest checkpoint of a root.

- ``checkpoint``: ``Checkpoint``, ``Lineage`` and ``Head``: reads a manifest, the chain back to its baseline, and the
  values that are not tensors.
- ``manifest_files``: reads manifest files, also in advance, and by one rank for all ranks of a load.
- ``latest``: ``latest``, which finds the newest committed checkpoint under a root.
- ``intact``: whether a checkpoint and its chain are still there.
- ``recent``: the checkpoints that this process has committed or read lately.
- ``destination``: the directory of a new checkpoint, and why none may be saved there.
- ``abandoned``: marks the checkpoints that a job has abandoned when it went back to an older one.
- ``other_roots``: dependencies on checkpoints of another root, and the tags that record them there.
- ``journal``: files under the root that record what was pruned, and what a prune removes.
- ``marker_commit``: the commit of a checkpoint whose rows are in a Kafka topic: by a commit record, not by the
  manifest.

Words of this package:

- *head*: the checkpoint that the next save of a job is based on: the last one that it saved or loaded.
- *committed manifest*, *replacement*: the manifest that a save wrote, and one that a compaction replaced it with.
- *marker*: the commit record.
"""
