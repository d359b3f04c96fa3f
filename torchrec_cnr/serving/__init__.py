"""Online model updates: a live model follows the checkpoints of a job, and no lookup sees a mixture of two of them.

A source of commits names the checkpoints. The path from the applied checkpoint to the newest one is read, verified and
decoded next to the model. Lookups wait only while the prepared rows are copied in.

- ``subscriber``: ``RowSubscriber``, which applies each new checkpoint from a thread and retries after errors.
- ``commit_sources``: where new checkpoints are announced: a root directory or a Kafka topic.
- ``served_model``: applies one checkpoint to the model, completely or not at all.
- ``update_path``: the checkpoints that lead from what is applied to what is wanted.
- ``model_tensors``: the tensors of the model that an update writes to.
- ``update``: reads and decodes an update next to the model, and keeps track of rows that deltas have overwritten.
- ``update_rows``: the rows of one table in an update.
- ``forward_lock``: a lock that forwards share and that an update takes exclusively.
- ``updates_report``: ``Applied`` and ``Lag``: what an update did, and how far the model is behind.

Words of this package:

- *applied*: the checkpoint that the model holds.
- *link*: a checkpoint on the path from the applied checkpoint to the newest one.
- *swap in*: copy the prepared rows over the model's, while no lookup runs.
- *touched row*: a row that a delta has overwritten since the baseline that the model was loaded from.
"""

from torchrec_cnr.serving.commit_sources import Commit, Commits, RootCommits
from torchrec_cnr.serving.subscriber import RowSubscriber
from torchrec_cnr.serving.updates_report import Applied, Lag

__all__ = ["Applied", "Commit", "Commits", "Lag", "RootCommits", "RowSubscriber"]
