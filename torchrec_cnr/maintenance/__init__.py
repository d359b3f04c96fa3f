"""What keeps a run of months in order: compaction, retention, verification, and ways in and out.

Pruning, from the bottom: ``catalog`` reads what lies under a root, with ``annotations`` (metrics, tags) and the
``journal`` (what was pruned before). ``retention`` says what is wanted; ``staying`` adds what that needs, by
``dependencies``, and what somebody works on. ``pruning`` works out what goes, by ``own_files``, as a ``prune_plan``,
which ``prune_execution`` executes.
"""
