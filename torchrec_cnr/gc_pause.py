"""A pause of Python's garbage collector while plans and manifests of many shards are built.

Hundreds of thousands of objects are created then, and none of them is garbage. Python nevertheless searches all objects
of the process now and then. This takes half of the coordinator's time in a job of a hundred ranks.
After the pause, the new objects are moved to the oldest generation, so that the collector does not search them at once.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY_OBJECTS = 20_000  # young objects; the collector searches fewer in about a millisecond


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector. If several threads do so, the first one that ends resumes it for all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # gc.unfreeze() would also unfreeze objects that the user froze. Counting those takes milliseconds if
            # there are many, so they are counted only if there are many young objects.
            if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
