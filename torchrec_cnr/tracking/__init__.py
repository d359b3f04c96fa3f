"""The row tracker: notices which rows of a model's tables are modified. The only package that knows TorchRec.

Rows are marked when the gradient of their lookup arrives, by a hook on the lookup's output. That is the moment at
which TorchRec's fused optimizers modify them: evaluation marks nothing, and pipelines that look the next batch up
before the present one is trained cannot lose an update to a cut in between. The hooks sit on TorchRec's lookup kernels,
not in the one slot of ``register_post_lookup_tracker_fn``: a tracker registered there, before or after, keeps working.

Rows are modified otherwise, too:

- tables that a ``torch.optim`` optimizer modifies are marked once more when it steps; see ``stepped``;
- rows that a managed-collision module evicts are marked when it does; see ``collisions``;
- replicas of a 2-D parallel model take over one another's rows when they are synchronised; see ``replicas``;
- whatever else writes to a table in place (``load_state_dict``, ``reset_parameters``) is noticed; see ``tracked``.
"""
