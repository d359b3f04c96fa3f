"""The report of a run: its page and its plots."""
