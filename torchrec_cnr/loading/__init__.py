"""The plug-ins for ``dcp.load``: fit a checkpoint to a state dict, and read it into the shards that each rank holds.

The planner says what is loaded into what, the reader reads it. The docstrings of these two modules list the calls of
one load in order.

- ``planner``: ``CNRLoadPlanner``, DCP's load planner: strict by default, and starts the tracker on what was loaded.
- ``reader``: ``CNRStorageReader``, DCP's storage reader: reads and verifies a whole checkpoint chain.
- ``fitting``: decides, once for all ranks, what of the checkpoint goes where, and reports it as ``LoadReport``.
- ``optimizer_state``: pairs optimizer state that has other names because the sharding of its table changed.
- ``ranked_objects``: names of objects that every rank has one of, such as data loader state.
- ``read_items``: the reads that fill the local shards of a rank, as items of DCP's load plan.
- ``item_regions``: turns each of these items into regions of the checkpoint chain.
- ``torchrec_inference``: ``InferenceTables``: finds the tables of quantized TorchRec modules.
- ``inference_tables``: these tables as targets of a load. Does not import TorchRec.

Words of this package:

- *wanted*: an item of a rank's state dict, as the coordinator sees it.
- *fit*: the decision of what is loaded into what.
- *row-wise state*: optimizer state with one value a row. Its size changes with the sharding, so the table's boxes place
  it.
"""
