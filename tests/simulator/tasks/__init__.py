"""What a simulation runs.

- ``models``: the tiny model that ranks train, and the memory of it that checkpoints are compared with.
- ``jobs``: what ranks of a job do, and what is remembered of their saves.
- ``ranks``: ranks that restore, train and save, and ``supervisors``, which start them again.
- ``managed_jobs``: what jobs with a ``CheckpointManager`` do, and ``managed_ranks``, their ranks.
- ``upkeep``: processes that compact, prune and read beside the jobs.
- ``serving``: a process that serves a model which follows the jobs.
- ``clocks``: clocks of hosts that are set meanwhile.
"""
