"""Files that are read as a whole, whoever wrote them: no longer than they may be."""

import os
from contextlib import suppress

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.stores import Store


def read_whole(store: Store, name: str, most_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        DamagedError: It has more than ``most_bytes``, or is a link or a pipe.
        StoreError: It cannot be read; its ``errno`` is ``ENOENT`` where it does not exist.
    """
    num_bytes = 0
    if store.is_local:
        with suppress(OSError):  # which is told when it is read
            num_bytes = os.stat(store.child(name), follow_symlinks=False).st_size
    if num_bytes <= most_bytes:
        data = store.read(name, 0, most_bytes + 1)
        if len(data) <= most_bytes:
            return data
    raise DamagedError(f"{store.url}/{name}: more than the {most_bytes} bytes it may have; use another checkpoint")
