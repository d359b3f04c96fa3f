"""Imports of DCP's own checkpoints."""
