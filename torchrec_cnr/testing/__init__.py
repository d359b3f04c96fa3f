"""Tests for any file system that should hold checkpoints: checks of the storage requirements, and injected faults.

::

    from torchrec_cnr.testing import Fault, FaultyStore, conformance_checks

    with FaultyStore("s3://bucket/tests") as store:
        store.faults[7] = Fault.FAIL  # the seventh operation from now on
        dcp.save(state, storage_writer=cnr.CNRStorageWriter(f"{store.url}/step-1"), planner=planner)

    for check in conformance_checks():
        check("s3://bucket/tests")

Each name is imported on first use, because processes that only race to commit a file do not need torch.

- ``__main__``: ``python -m torchrec_cnr.testing <url>``, which runs the checks on a file system.
- ``conformance``: ``conformance_checks`` lists the checks, and ``run_conformance`` runs them.
- ``checks``: the storage requirements, each with the check that a file system meets it.
- ``racing``: several processes create the same file at once, and exactly one must succeed.
- ``trips``: a small job saves, compacts and prunes while one operation of its file system fails.
- ``faults``: ``FaultyStore``, which counts operations and injects faults into those that a test names.
- ``file_system``: the fsspec file system that a ``FaultyStore`` registers.

Terms of this package:

- *operation*: one request to a file system.
- *fault*: an error that is injected into an operation: it fails, is truncated, repeated, reordered or delayed.
- *trip*: a run of the small job with one fault.
- *racer*: a process that takes part in a race.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
