"""The end of a simulated process whose script has ended, as Python's interpreter does it, and what must not be left.

Functions that the library has registered with ``threading`` are called, in the reverse of their order; among them is
the one of ``concurrent.futures``, after which pools refuse new work, and whose threads are waited for. Then all threads
but daemons are waited for, and the others are gone.
"""

import concurrent.futures.thread
import threading
from typing import Any

from tests.simulator.engine.installing import of_process
from tests.simulator.engine.scheduler import FindingError, Scheduler, this_task


def end_interpreter(sim: Scheduler) -> None:
    """Do what the interpreter does in this task's process when its script has ended."""
    for call in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        if call.func is concurrent.futures.thread._python_exit:
            _end_pools(sim)
        elif (own := of_process(getattr(call.func, "__self__", None))) is not None:
            getattr(own, call.func.__name__)()
    _join(sim)


def _end_pools(sim: Scheduler) -> None:
    task = this_task()
    assert task is not None
    task.process.own["is_ending"] = True
    _join(sim)


def _join(sim: Scheduler) -> None:
    task = this_task()
    assert task is not None
    threads: dict[Any, Any] = task.process.own.get("threads", {})

    def has_ended() -> bool:
        return not any(thread.is_alive() and not thread.daemon for own, thread in threads.items() if own is not task)

    sim.wait("all threads", has_ended)


def check_nothing_left(sim: Scheduler) -> None:
    """No thread of this task's process waits for anything, now that its work is done; none is in a registry.

    Raises:
        FindingError: One does.
    """
    this = this_task()
    assert this is not None
    own = this.process.own
    for task in sim.tasks:
        is_other = task.process is this.process and task is not this and not task.is_ready
        if task.name.endswith("/cnr-leases"):  # it ends hours after the last lease
            continue
        # What has failed in the background is cleaned up by the next save, or at the end of the interpreter.
        if is_other and (own.get("is_ending") or not task.is_timer):
            raise FindingError("left waiting", f"{task.name} in {task.what} when {this.process.name} ends")
    saves = own.get("running_saves")
    if own.get("is_ending") and saves is not None and saves._saves:
        raise FindingError("left in a registry", f"{len(saves._saves)} saves when {this.process.name} ends")
    renewals = own.get("_renewals")
    if own.get("is_ending") and renewals is not None and renewals._leases:
        names = ", ".join(lease.name for lease in renewals._leases.values())
        raise FindingError("left in a registry", f"the leases {names} when {this.process.name} ends")
