"""Benchmarks of saves.

- ``alternatives``: torch.save, plain DCP and deltas written by hand, as tables grow.
- ``async_``: stalls, rate and memory of asynchronous saves.
- ``bytes``: size of a delta on disk.
- ``cost``: time and bytes of a delta by the share of rows modified.
- ``every_second``: an hour of training with a local checkpoint every second.
- ``growth``: the stall of an asynchronous save as tables grow.
- ``headline``: the figures of the README, exact rows and 4 bits against plain DCP.
- ``memory``: peak memory of saves and loads.
- ``metrics``: the time that recording metrics and spans takes, as a share of the steps between two saves.
- ``preemption``: time from a scheduler's signal to the commit.
- ``scale``: a thousand tables on 128 ranks.
- ``time``: time of a delta save and of a load.
- ``training``: throughput of training with asynchronous saves.
- ``transform_memory``: peak memory of a save of transform-coded rows.
- ``transform_saves``: time of a delta save of transform-coded rows.
"""
