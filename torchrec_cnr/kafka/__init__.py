"""The Kafka store: rows of deltas go to a topic, and markers in another one commit checkpoints.

A pack of rows is a run of records in one partition, sent in one transaction; the manifest names partition and offsets.
Baselines, the dense part and reader state are files as ever. A checkpoint is committed by a marker, which the
coordinator sends in a transaction of its own once all packs and the manifest are durable. Producers have transactional
ids that stay the same from job to job, so that the broker itself refuses what a job sends whose successor has begun.
See docs/design/005-kafka.md.
"""

from torchrec_cnr.kafka.kafka_rows import KafkaRows, disconnect

__all__ = ["KafkaRows", "disconnect"]
