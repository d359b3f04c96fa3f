"""Every error that this package raises on purpose, grouped by what the caller should do about it.

    CNRError
    ├── ConfigurationError       the call is wrong: change the arguments
    ├── SaveError                this save failed, the last checkpoint is intact: save again
    │   ├── CheckpointExistsError    the id has a committed checkpoint: save with another id
    │   ├── FencedError              a newer job saves to this root: stop this job
    │   └── UntrackedRowsError       rows were modified but not marked: mark them, save again
    ├── LoadError                the load is incomplete: do not continue training
    │   ├── CheckpointNotFoundError  there is no committed checkpoint here
    │   ├── StateMismatchError       the checkpoint does not match the state dict
    │   ├── VersionError             a newer version wrote the checkpoint: upgrade
    │   └── DamagedError             the checkpoint or its chain is corrupt: use another checkpoint
    └── StoreError               a file system operation failed: fix the cause (disk full, permissions), try again

A message says what is wrong, where, expected and got, and the way out.
"""
# DCP pickles the errors of a rank to send them to all others. So an error has its message as its only argument.


class CNRError(Exception):
    """The base class of all errors of this package."""


class ConfigurationError(CNRError, ValueError):
    """An argument, or a combination of objects passed to DCP, is invalid."""


class SaveError(CNRError):
    """A save failed. Its rows are still marked, so the next save includes them.

    Nothing was committed, unless a rank did not answer: then the store may have the manifest or not.
    """


class CheckpointExistsError(SaveError):
    """The checkpoint id already has a committed checkpoint."""


class FencedError(SaveError):
    """A newer job has begun to save to the same root."""


class UntrackedRowsError(SaveError):
    """Rows were modified since the last save but not marked, so a delta would lack them."""


class LoadError(CNRError):
    """A load failed. The target tensors may contain a mixture of old and new values.

    No tensor has changed if the error is a ``CheckpointNotFoundError``, ``StateMismatchError`` or ``VersionError`` in a
    ``CheckpointException``. If ``load_state_dict`` of an object raised it, such as that of ``RandomState``, tensors
    already hold the checkpoint: call ``tracker.forget()``, so that the next save is a baseline.
    """


class CheckpointNotFoundError(LoadError):
    """There is no committed checkpoint at this path or URL."""


class StateMismatchError(LoadError):
    """A tensor's shape or dtype differs between checkpoint and state dict, or it is missing on one side."""


class VersionError(LoadError):
    """The checkpoint was written in a version of the format that this package cannot read."""


class DamagedError(LoadError):
    """A manifest, data file or checkpoint chain is corrupt: truncated, altered, foreign or contradictory."""


class StoreError(CNRError, OSError):
    """An operation of a file system, an object store or Kafka failed."""
