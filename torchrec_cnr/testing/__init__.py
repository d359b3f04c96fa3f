"""For tests of whatever stores checkpoints: a file system that fails when it is told to.

::

    from torchrec_cnr.testing import Fault, FaultyStore

    with FaultyStore("s3://bucket/tests") as store:
        store.faults[7] = Fault.FAIL  # the seventh operation from now on
        dcp.save(state, storage_writer=cnr.CNRStorageWriter(f"{store.url}/step-1"), planner=planner)
"""

from torchrec_cnr.testing.faults import Fault, FaultyStore, Operation

__all__ = ["Fault", "FaultyStore", "Operation"]
