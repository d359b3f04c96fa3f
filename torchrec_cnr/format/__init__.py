"""The format of checkpoints, as values: what docs/format.md specifies. No module here does I/O."""
