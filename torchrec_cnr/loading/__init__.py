"""The plug-ins for ``dcp.load``: fit a checkpoint to a state dict, and read it into the shards that each rank has.

The planner decides what is loaded into what. The reader reads it. The docstrings of these two modules list the calls of
one load in order.

- ``planner``: ``CNRLoadPlanner``, DCP's load planner: strict by default, and restores the tracker after a load.
- ``reader``: ``CNRStorageReader``, DCP's storage reader: reads and verifies a whole checkpoint chain.
- ``opened_chain``: the checkpoint chain of a load, whose older manifests the coordinator reads for all ranks.
- ``fitting``: decides, once for all ranks, what of the checkpoint is loaded into what; also the names of objects that
  every rank has one of, such as data loader state.
- ``load_report``: ``LoadReport``: what a load did with every name.
- ``warm_start``: fits a checkpoint to another model, by rules for names and sizes.
- ``row_maps``: from which saved row each row of a resized table is loaded.
- ``id_maps``: sorts the id maps of managed collisions, and carries ids over to tables with more rows.
- ``optimizer_state``: pairs optimizer state that has other names because the sharding of its table changed.
- ``read_items``: layouts, which convert what was saved to what is wanted; the reads that fill a rank's local shards, as
  items of DCP's load plan; and the regions of the checkpoint chain that each item needs.
- ``torchrec_inference``: ``InferenceTables``: finds the tables of quantized TorchRec modules; no other module here
  imports TorchRec.

Terms of this package:

- *wanted*: an item of a rank's state dict, as the coordinator sees it.
- *fit*: the decision of what is loaded into what.
- *row-wise state*: optimizer state with one value per row. Its size changes with the sharding, so the regions of the
  table's shards determine its rows.
"""

from torchrec_cnr.dependencies import check_versions

check_versions()  # before TorchRec is imported
