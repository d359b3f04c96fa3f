"""Reading a lineage: its checkpoints merged into tensors."""
