"""Verification: checks whether a restore would give exactly what was committed.

- ``verify``: ``verify``, which checks every checkpoint of a chain and lists what is wrong.
- ``damage``: finds the corrupt or missing bytes of one checkpoint, by decoding it and by comparing digests.
- ``impact``: finds the checkpoints that cannot be restored because of corrupt data.
"""
