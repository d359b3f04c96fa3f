"""Every error this package raises on purpose, grouped by what a caller would do about it.

    CNRError
    ├── ConfigurationError       the call is wrong: change the arguments
    ├── SaveError                this save did not happen: the last checkpoint stands, save again
    │   ├── CheckpointExistsError    the id is taken: save under another one
    │   ├── FencedError              another job saves to this root now: end this one
    │   └── UntrackedRowsError       rows were modified but not marked: mark them, save again
    ├── LoadError                nothing was loaded completely: do not train on
    │   ├── CheckpointNotFoundError  there is no committed checkpoint here
    │   ├── StateMismatchError       the checkpoint and the state dict do not fit each other
    │   ├── VersionError             written by a newer version: upgrade
    │   └── DamagedError             bytes or lineage are not what was committed: use another checkpoint
    └── StoreError               the file system refused: mend it (disk full, permissions), try again

Messages say what, where, expected, got, and the way out. Each error is made of its message alone, so that it survives
the pickling by which DCP carries a failure from one rank to all others.
"""


class CNRError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(CNRError, ValueError):
    """An argument, or a combination of objects passed to DCP, cannot work."""


class SaveError(CNRError):
    """A save failed; nothing was committed and its rows stay marked for the next save."""


class CheckpointExistsError(SaveError):
    """The checkpoint id holds a committed checkpoint already."""


class FencedError(SaveError):
    """Another job began to save to the same root later."""


class UntrackedRowsError(SaveError):
    """Rows were modified since the last save, but not marked: a delta would lack them."""


class LoadError(CNRError):
    """A load failed; tensors of the target may hold a mixture of old and new values."""


class CheckpointNotFoundError(LoadError):
    """No committed checkpoint lies at this place."""


class StateMismatchError(LoadError):
    """A tensor's shape or dtype differs between checkpoint and state dict, or it is missing on one side."""


class VersionError(LoadError):
    """The checkpoint was written by a version of the format that this package does not read."""


class DamagedError(LoadError):
    """A manifest, pack or lineage is truncated, altered, foreign or contradicts itself."""


class StoreError(CNRError, OSError):
    """A file system operation failed."""
