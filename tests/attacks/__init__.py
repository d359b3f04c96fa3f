"""Checkpoints that somebody made to do harm, and what makes them; see README.md."""
