"""Pruning: decides which checkpoints of a root are kept, and removes the others.

- ``retention``: ``Keep`` and ``Best``, the rules that say which checkpoints are wanted.
- ``kept``: what else must be kept: what wanted checkpoints need, what is in use, and what cannot be read.
- ``plan``: ``plan_prune``, which works out what will be removed, in which order, and why the rest is kept.
- ``execute``: removes what a plan lists, and checks right before each removal that nothing needs it by now.

Words of this package:

- *need*: a checkpoint needs its parents, and the directories whose data files it uses.
- *horizon*: the time up to which everything is kept because a checkpoint that cannot be read may depend on it.
"""
