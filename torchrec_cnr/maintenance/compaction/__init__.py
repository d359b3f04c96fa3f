"""Compaction: a lineage is rewritten as less."""
