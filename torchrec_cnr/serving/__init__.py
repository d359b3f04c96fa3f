"""Online model updates: a live model applies the checkpoints of a job, and no lookup sees a mixture of two of them.

A source of commits names the checkpoints. The path from the applied checkpoint to the newest one is read, verified and
decoded into separate memory. Lookups wait only while the prepared rows are copied into the model.

- ``subscriber``: ``RowSubscriber``, which applies each new checkpoint in a thread and retries after errors.
- ``commit_sources``: sources that announce new checkpoints: a root directory or a Kafka topic.
- ``served_model``: applies one checkpoint to the model, completely or not at all.
- ``update_path``: the checkpoints that lead from the applied checkpoint to the newest one.
- ``model_tensors``: the tensors of the model that an update writes to.
- ``update``: reads and decodes an update into separate memory, and tracks the rows that deltas have overwritten.
- ``update_rows``: the rows of one table in an update.
- ``id_map_updates``: the id maps of managed collisions in an update, which TorchRec keeps sorted.
- ``forward_lock``: a lock that forwards share and that an update takes exclusively.
- ``updates_report``: ``Applied`` and ``Lag``: the result of an update, and the delay of the model.

Words of this package:

- *applied*: the checkpoint that the model contains.
- *link*: a checkpoint on the path from the applied checkpoint to the newest one.
- *swap in*: copy the prepared rows into the model, while no lookup runs.
- *touched row*: a row that a delta has overwritten since the baseline that the model was loaded from.
"""

from torchrec_cnr.dependencies import check_versions

check_versions()  # before TorchRec is imported

from torchrec_cnr.serving.commit_sources import Commit, Commits, RootCommits
from torchrec_cnr.serving.subscriber import RowSubscriber
from torchrec_cnr.serving.updates_report import Applied, Lag

__all__ = ["Applied", "Commit", "Commits", "Lag", "RootCommits", "RowSubscriber"]
