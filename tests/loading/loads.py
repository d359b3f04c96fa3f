"""Loads by the rules of a planner, and the messages of those that are refused."""

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support import faults


def load_by(target: dict[str, Any], path: str, **options: Any) -> cnr.LoadReport:
    """Load into a state dict with a planner of these options; its report."""
    planner = cnr.CNRLoadPlanner(**options)
    dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    return planner.report


def refusal(target: dict[str, Any], path: str, **options: Any) -> str:
    """The message of a load that is refused."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        load_by(target, path, **options)
    (error,) = {str(error) for error in faults.causes(caught.value).values()}
    return error
