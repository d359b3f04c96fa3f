"""Merges the checkpoints of a chain into tensors, oldest first, independently of DCP's plans and of TorchRec.

- ``load_table``: ``load_table``, which reads one table, or a range of its rows, without DCP.
- ``plan``: computes which blobs of which checkpoints the wanted regions need, without I/O.
- ``fold``: executes a plan: reads the row numbers first and then the rows, verifies them, and writes each row from the
  newest checkpoint that has it.
- ``blocks``: the rows of one blob: their numbers in the tensor, and their decoding.
- ``regions``: the wanted parts of a tensor, which rows of blocks are written into; ``LineageTensor`` creates them.
  Tables that inference kernels keep quantized take codes without decoding.
- ``transforms``: the transforms of rows that were read, each once, however many checkpoints and shards use it.

Words of this package:

- *fold*: merge a checkpoint chain, so that rows of newer checkpoints overwrite those of older ones.
- *region*: a wanted part of a tensor, and the target of its values.
- *turn*: the position of a block in the order of overwriting; a row is decoded from the last turn that has it.
- *window*: the checkpoints whose row numbers are read together, before any of their rows.
- *exact row*: a row that codes cannot represent, stored in full after the codes.
"""
