"""The garbage collector, paused while plans and manifests of many shards are made.

All that is made then stays, hundreds of thousands of objects, and now and then Python looks through all objects of the
process for garbage among them: half of the time that a coordinator of a hundred ranks takes. Afterwards, what was made
counts as old, so that it is not looked through at once, but when it is the turn of old objects.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY_OBJECTS = 20_000  # young ones; the collector looks through fewer in about a millisecond


@contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage is looked for. Threads may do this at the same time: then the first to end resumes it for all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # A user's frozen objects must stay frozen. To count them takes milliseconds if there are many.
            if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
