"""Committed checkpoints, what each one is based on, and which one is the latest.

- ``checkpoint``: ``Checkpoint``, ``Lineage`` and ``Head``: reads a manifest, the chain back to its baseline, and the
  values that are not tensors.
- ``latest``: ``latest``: the newest committed checkpoint under a root.
- ``abandoned``: which checkpoints a job has left behind, when it went back to an older one.
- ``other_roots``: dependencies on checkpoints of another root, and how that root learns of them.
- ``marker_commit``: the commit of a checkpoint whose rows are in a Kafka topic: by a commit record, not by the
  manifest.

Words of this package:

- *head*: the checkpoint that a running job is based on: the last one that it saved or loaded.
- *committed manifest*, *replacement*: the manifest that a save wrote, and one that a compaction put in its place.
- *marker*: the commit record.
"""
