"""``RowTracker``: records which rows of a model's embedding tables are modified. Supports TorchRec.

A hook on the output of a lookup marks its rows when their gradient arrives. TorchRec's fused optimizers modify the rows
at that moment. So evaluation marks nothing, and a pipeline that looks up the next batch early loses no update to a save
in between. The hooks are on TorchRec's lookup kernels. The single slot of ``register_post_lookup_tracker_fn`` remains
free: a tracker that is registered there keeps working.

The tracker also marks rows that are modified in other ways: by a ``torch.optim`` optimizer (``torch_optim``), or by a
managed-collision module that evicts ids (``managed_collisions``). The synchronization of a 2-D parallel model
(``replicas``) and in-place writes such as ``load_state_dict`` (``tracked_tables``) modify rows, too.

- ``row_tracker``: ``RowTracker``: finds the tables of a model, and offers ``mark`` for rows that it cannot notice.
- ``modified_rows``: the sets of modified rows of one shard, and how rows move between these sets.
- ``tracked_tables``: all shards on this rank, the checkpoint that their marks refer to, and writes in place.
- ``sharded_tables``: tables in TorchRec's sharded collections.
- ``plain_tables``: ``nn.EmbeddingBag`` and ``nn.Embedding``.
- ``torch_optim``: tables that a ``torch.optim`` optimizer modifies.
- ``managed_collisions``: rows that are reset because their ids were evicted, and the id maps.
- ``id_map_buffers``: which values of the id maps have changed, found by comparison with the last snapshot.
- ``replicas``: replicas of a 2-D parallel model, which are averaged from time to time.
- ``hooks``: everything that a tracker attaches to a model, so that all of it can be removed.
- ``untracked_rows``: the optional check that no row was modified without being marked.
- ``row_digests``: the digests of 8 bytes for each row that this check compares.

Terms of this package:

- *mark*: record that a row was modified.
- *freeze*: take the modified rows for a save that begins. Rows marked later belong to the next save.
- *commit*: drop the frozen rows, because the manifest of their save is in the store.
- *rollback*: mark the frozen rows again, because their save failed.
- *since baseline*: the rows in committed deltas since the last full checkpoint.
- *heat*: how often a row was committed lately, from 0 (cold) to 3 (hot).
- *reference*: the digests of a tensor's rows at the last snapshot.
- *untracked row*: a row that was modified without being marked.
"""

from torchrec_cnr.dependencies import check_versions

check_versions()  # before TorchRec is imported
