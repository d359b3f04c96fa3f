"""Where bytes are, and who may touch them."""
