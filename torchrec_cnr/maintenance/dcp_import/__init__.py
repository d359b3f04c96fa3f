"""Imports: makes a baseline of a checkpoint that ``dcp.save`` wrote in its own format, without running code from it.

- ``import_checkpoint``: ``import_checkpoint``, a save whose items are rows of the source.
- ``dcp_checkpoint``: finds the values of each tensor in the source's files, and reads rows of them.
- ``dcp_metadata``: reads DCP's ``.metadata``, a pickle, with nothing but the few classes that it needs.
"""
