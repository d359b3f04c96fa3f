"""Directories in any fsspec file system: where checkpoints are stored, and who may change them.

- ``store``: ``Store``, a directory: read, write, list, and create a file atomically, which is how a save commits.
- ``urls``: which paths and URLs may name a directory.
- ``retries``: which errors are transient, and retries with exponential backoff.
- ``local_files``: local files that survive a power failure and appear as a whole.
- ``files``: files that are written piece by piece, and directory listings.
- ``s3fs_client``: S3 by s3fs, without its own retries.
- ``obstore_s3``: a fast S3 client for URLs with ``s3+obstore://``.
- ``pack_writer``: collects blobs into data files and uploads several at a time.
- ``pack_reader``: reads blobs of data files with few requests, and checks their digests.
- ``leases``: files that protect a checkpoint from pruning while a save, load or compaction uses it.
- ``fences``: files by which a job that was replaced learns that it must not save any more.
- ``row_log``: ``RowLog``, the interface of a Kafka topic that holds rows.

Words of this package:

- *pack*: a data file, in the format of safetensors.
- *blob*: a range of bytes in a pack with a digest of its own, usually a block of rows.
- *span*: a range of a pack that is read with one request; it covers one blob or several close ones.
- *row log*: a topic that holds packs and commit records.
- *marker*: the commit record of a checkpoint in a row log.
"""
