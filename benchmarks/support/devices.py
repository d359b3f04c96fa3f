"""The device that the benchmarks for GPUs use."""

import torch

from benchmarks.support.report import Report
from benchmarks.support.rounds import Setup

NO_DEVICE = "no CUDA device here: nothing was timed"


def benchmark_device(setup: Setup) -> torch.device | None:
    """Return the current CUDA device; without one, the CPU to try a benchmark with ``--quick``, and else None."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if setup.quick else None


def nothing_timed(setup: Setup) -> Report:
    """Return the report of a benchmark on a machine without a CUDA device."""
    setup.say(NO_DEVICE)
    return Report(NO_DEVICE, (), ())


def wait_for(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device for titles."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
