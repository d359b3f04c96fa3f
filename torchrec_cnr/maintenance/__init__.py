"""What is done with checkpoints after they were saved: each in a module of its own, in one process, without a model.

``exporting`` writes a lineage as plain files that load without this package, ``importing`` makes a baseline of a
checkpoint of DCP's own format.
"""
