"""Whether a lineage can be loaded."""
