"""DCP's save plug-ins, and what they are made of."""
