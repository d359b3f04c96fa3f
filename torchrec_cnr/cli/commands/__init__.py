"""The commands of ``cnr``: the name of a file is the name of its command."""
