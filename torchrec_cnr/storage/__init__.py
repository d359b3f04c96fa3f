"""Directories in any fsspec file system: where checkpoints are stored, and which job may change them.

- ``store``: ``Store``, a directory: read, write and list files, and create a file atomically, which commits a save.
- ``urls``: checks which paths and URLs may name a directory.
- ``retries``: classifies transient errors, and retries with exponential backoff.
- ``local_copies``: ``LocalCopies``, data files on a disk of this host, from which restores read what they can.
- ``local_files``: writes local files atomically, so that they survive a power failure.
- ``files``: files that are written piece by piece, and directory listings.
- ``s3fs_client``: the s3fs client without its own retries.
- ``obstore_s3``: a fast S3 client for URLs with ``s3+obstore://``.
- ``pack_writer``: collects blobs into data files and uploads several at a time.
- ``pack_reader``: reads blobs of data files with few requests, and checks their digests.
- ``leases``: files that protect a checkpoint from pruning while a save, load or compaction uses it.
- ``fences``: files that stop the saves of a job that a newer job has replaced.
- ``row_log``: ``RowLog``, the interface of a Kafka topic that holds rows.

Words of this package:

- *pack*: a data file in the safetensors format.
- *blob*: a range of bytes in a pack with its own digest, usually a block of rows.
- *span*: a range of a pack that is read with one request. It covers one blob, or several that are close together.
- *row log*: a Kafka topic that holds packs and commit records.
- *marker*: the commit record of a checkpoint in a row log.
"""
