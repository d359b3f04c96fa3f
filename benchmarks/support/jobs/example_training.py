"""The model and the clicks of ``examples/train_dlrm.py``, on this rank."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SEED = 1
TIMEOUT = timedelta(seconds=300)


class ExampleTraining:
    """The example's model, untrained, and its clicks. It starts the process group of gloo.

    Args:
        num_rows: Rows of each large table.
        dim: Columns of the tables.
        batch_size: Clicks of a step, of all ranks.

    Attributes:
        trainer: The example's trainer.
    """

    def __init__(self, num_rows: int, dim: int, batch_size: int) -> None:
        sys.path.insert(0, str(EXAMPLES))
        # Imported here, because the folder of examples is on the path only now.
        from click_data import open_stream  # noqa: PLC0415
        from dlrm_model import build_trainer  # noqa: PLC0415

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self._stream = open_stream("synthetic", None, SEED)
        self._batch_size = batch_size
        self.trainer: Any = build_trainer(self._stream, num_rows, dim, "row", SEED)

    def batches(self, num_done: int) -> Iterator[Any]:
        """Yield the clicks of this rank for each step, after as many steps as were done."""
        from samples import global_batches, rank_share  # noqa: PLC0415

        for batch in global_batches(self._stream, num_done * self._batch_size, self._batch_size):
            yield rank_share(batch, dist.get_rank(), dist.get_world_size())
