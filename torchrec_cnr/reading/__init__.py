"""Merges the checkpoints of a chain into tensors, oldest first. Knows neither DCP's plans nor TorchRec.

- ``load_table``: ``load_table``, which reads one table, or a range of its rows, without DCP.
- ``plan``: which blobs of which checkpoints are needed for the wanted regions, without I/O.
- ``fold``: executes a plan: reads row numbers first, then the rows; verifies, and writes each from the newest
  checkpoint that has it.
- ``blocks``: the rows of one blob: which rows of a tensor they are, and how they are decoded.
- ``regions``: the wanted parts of a tensor, and how rows of a block get into them; tables that inference kernels keep
  quantized take codes without decoding. ``LineageTensor`` makes them.

Words of this package:

- *fold*: merge a checkpoint chain: rows of newer checkpoints overwrite those of older ones.
- *region*: a wanted part of a tensor, and where its values go.
- *turn*: the position of a block in the order of overwriting; a row is decoded from the last turn that has it.
- *window*: the checkpoints whose row numbers are read before any rows.
- *exact row*: a row that codes cannot represent, stored in full after the codes.
"""
