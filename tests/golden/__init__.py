"""Checkpoints as earlier versions wrote them, byte for byte, and the programs that wrote them."""
