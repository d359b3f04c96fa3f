"""The checkpoint format of docs/reference/format.md, as values with their validation. No module here does I/O.

- ``boxes``: ``Box``, the region of a tensor that a shard covers (offsets and sizes).
- ``manifest``: ``Manifest``, ``TensorEntry``, ``Shard`` and ``Pack``, which describe one checkpoint.
- ``row_sets``: ``RowSet``, the stored rows of a shard, and the compressed coding of their numbers.
- ``manifest_json``: converts a manifest to JSON and back, with its digest.
- ``manifest_parser``: validates a manifest before anything relies on it.
- ``coverage``: ``Coverage``, which finds missing and overwritten rows in a region of a tensor.
- ``blob_bytes``: converts codes, their scales and biases, and exact rows to the bytes of a blob.
- ``safe_pickle``: checks which functions a pickle would call and how much memory it would take, before it is loaded.

Terms of this package:

- *box*: a shard region, which is the offsets and sizes of a shard in its tensor.
- *pack*: a data file.
- *blob*: a range of bytes in a pack, usually a block of rows.
- *row set*: the numbers of the stored rows of a shard, in blocks; a table and its optimizer state share one.
- *folded*: merged; the shards of a folded tensor come from several checkpoints and may overlap.
- *tail*: the bytes of a row after its codes, such as scale and bias.
- *split blob*: a byte-split block: it stores the tails of its rows separately, as compressed byte planes.
- *plane*: all first bytes of some numbers, or all second bytes, and so on.
- *frame*: planes compressed with Zstandard.
- *hole*: a row that no checkpoint of the chain stores.
"""
