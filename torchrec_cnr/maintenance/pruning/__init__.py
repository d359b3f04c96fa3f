"""Pruning: what is kept, and what is removed."""
