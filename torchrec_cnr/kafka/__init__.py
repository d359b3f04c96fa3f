"""Rows of deltas in a Kafka topic. A commit record in a second topic commits each checkpoint.

A data file becomes a run of records in one partition, sent in one transaction; the manifest names partition and
offsets. Baselines, dense tensors and data loader state remain files. The coordinator sends the commit record in a
separate transaction, after all rows and the manifest are durable. The transactional ids of producers do not change
from job to job, so the broker rejects records of a job after its successor has started. See docs/design/005-kafka.md.

- ``kafka_rows``: ``KafkaRows``, the argument that names brokers and topics; ``disconnect`` closes all connections.
- ``connection``: the connections of one process to a cluster: writes and reads rows and commit records.
- ``topics``: creates the topics, and refuses those whose settings would lose rows.
- ``producers``: transactional producers: they send all records or none, and each only once.
- ``consumers``: consumers that read ranges of records by offset, without subscriptions.
- ``offsets``: the first and last offsets of partitions.
- ``pack_targets``: sends the data files of one save of one rank.
- ``marker_topic``: the topic of commit records, and how a save learns whether it was committed.
- ``records``: the layout of the records, with its validation.
- ``clients``: settings of the Kafka clients, the conversion of their errors, and the clients of a process.

Words of this package:

- *pack*: a data file; here, a run of records.
- *part*: one record of a pack.
- *marker*: the commit record of a checkpoint.
- *fenced producer*: a producer that the broker refuses because a newer one uses its transactional id.
- *tombstone*: a record without a value, which removes a key from a compacted topic.
"""

from torchrec_cnr.kafka.kafka_rows import KafkaRows, disconnect

__all__ = ["KafkaRows", "disconnect"]
