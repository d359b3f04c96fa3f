"""The commands of ``cnr``, one module for each. The name of the module is the name of the command.

- ``ls``: lists the checkpoints under a root, and what each save wrote.
- ``inspect``: shows what one checkpoint contains, from its manifest.
- ``latest``: prints the newest checkpoint of a root.
- ``verify``: reads a whole checkpoint chain and reports every corrupt byte.
- ``diff``: shows what differs between two checkpoints.
- ``prune``: removes the checkpoints that retention rules do not keep.
- ``tag``: two commands, ``cnr tag`` and ``cnr untag``: names that keep a checkpoint from being pruned.
- ``compact``: merges a checkpoint chain into one checkpoint.
- ``export``: two commands, ``cnr export`` and ``cnr import``: to plain files, and from DCP's own format.
- ``report``: writes a page that shows what a run has written, kept and read.
- ``estimate``: estimates bytes, bandwidth, disk and memory before there is a checkpoint.
"""
