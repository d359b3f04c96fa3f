"""What keeps a run of months in order: compaction, retention, verification, and ways in and out."""
