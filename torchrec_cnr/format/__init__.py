"""The checkpoint format of docs/reference/format.md, as values with their validation. No module here does I/O.

- ``boxes``: ``Box``, the region of a tensor that a shard covers (offsets and sizes).
- ``manifest``: ``Manifest``, ``TensorEntry``, ``Shard`` and ``Pack``: everything that describes one checkpoint.
- ``row_sets``: which rows of a shard are stored, and the compressed coding of their numbers.
- ``manifest_json``: a manifest as JSON and back, with its digest.
- ``manifest_parser``: the checks that a manifest passes before anything relies on it.
- ``coverage``: which elements of a box are stored: finds missing rows and overwritten ones.
- ``blob_bytes``: how codes, their scales and biases, and rows stored exactly become the bytes of a blob.
- ``safe_pickle``: checks a pickle for what it would call and how much memory it would take, before it is loaded.

Words of this package:

- *box*: offsets and sizes of a shard in its tensor.
- *pack*: a data file.
- *blob*: a range of bytes in a pack, usually a block of rows.
- *row set*: the numbers of the stored rows of a shard, in blocks; a table and its optimizer state share one.
- *folded*: said of a tensor whose shards come from several checkpoints and may overlap.
- *tail*: the bytes of a row after its codes, such as scale and bias.
- *split blob*: a blob that stores the tails of its rows apart, compressed.
- *plane*: all first bytes of some numbers, or all second bytes, and so on.
- *frame*: planes compressed with Zstandard.
- *hole*: a row that no checkpoint of the chain stores.
"""
