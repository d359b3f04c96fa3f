"""Imports: makes a baseline of a checkpoint that ``dcp.save`` wrote in its own format, without running code from it.

- ``import_checkpoint``: ``import_checkpoint``, which saves the tensors and objects of the source as a baseline.
- ``dcp_checkpoint``: finds the values of each tensor in the source's files, and reads rows of them.
- ``dcp_metadata``: reads DCP's ``.metadata``, a pickle, and allows only the few classes that it needs.
"""
