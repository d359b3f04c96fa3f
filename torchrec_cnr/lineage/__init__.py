"""Committed checkpoints, and what each is based on."""
