"""What is done to the checkpoints of a run after they are saved."""
