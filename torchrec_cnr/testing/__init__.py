"""For tests of whatever stores checkpoints: a file system that fails when it is told to, and checks of any other.

::

    from torchrec_cnr.testing import Fault, FaultyStore, conformance_checks

    with FaultyStore("s3://bucket/tests") as store:
        store.faults[7] = Fault.FAIL  # the seventh operation from now on
        dcp.save(state, storage_writer=cnr.CNRStorageWriter(f"{store.url}/step-1"), planner=planner)

    for check in conformance_checks():
        check("s3://bucket/tests")

Names are imported when they are asked for: processes that only race for a commit need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
