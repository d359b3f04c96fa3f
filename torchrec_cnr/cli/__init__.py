"""The command line, and the pages that it writes. Needs the extra ``cli``; nothing else in the package imports it."""
