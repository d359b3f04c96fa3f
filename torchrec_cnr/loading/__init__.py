"""DCP's load plug-ins, and what they are made of."""
