"""Constants of the format of manifests, which docs/format.md specifies."""

import re

FORMAT = "torchrec_cnr"
VERSION = 6  # the newest that is read
SPLIT_VERSION = 6  # written where blobs are split
LOGGED_VERSION = 5  # written where packs lie in a log
PACKED_VERSION = 4  # holds another version, compressed
PLAIN_VERSION = 3  # all others

# How a checkpoint names another: '../' first, then plain names.
PARENT_PATH = re.compile(r"(\.\./)+(?!\.\.?(/|$))[^/\\\x00-\x1f]+(/(?!\.\.?(/|$))[^/\\\x00-\x1f]+)*")
