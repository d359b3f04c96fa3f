"""Exports: writes a checkpoint, merged from its whole chain, as plain files that load without this package.

- ``export``: ``export``, which opens the checkpoint and calls the writer of the format.
- ``contents``: reads tensors and objects a bounded part at a time.
- ``to_dcp``: writes DCP's own format, with DCP's own writer.
- ``to_safetensors``: writes safetensors files, with an index if there are several.
- ``to_torch``: writes one file that ``torch.load`` reads.
- ``destination``: the new directory or file, which is removed again if the export fails.

Words of this package:

- *chunk*: rows of one tensor that are read together.
- *batch*: chunks that are read from the chain in one pass.
"""
