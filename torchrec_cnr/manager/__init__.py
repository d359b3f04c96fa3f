"""One object for a run."""
