"""A job with one table of transform-coded rows in a compacted topic, and what its checkpoints must hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import torchrec_cnr as cnr
from tests.kafka.compacted.topic_jobs import compacted
from tests.quantization.test_transform_coded import DIM, few_dimensions
from tests.quantization.test_transformed_checkpoints import FQN, LARGEST_SHARE, RULE, largest_errors
from tests.servers.kafka_server import Broker
from tests.support import models
from tests.support.models import differing
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.kafka import KafkaRows
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.storage.store import Store

BLOCK_ROWS, NUM_BLOCKS = 500, 6
NUM_ROWS = BLOCK_ROWS * NUM_BLOCKS - 77  # the last block has fewer
_TABLE = "users"


def block_topic(broker: Broker, itemsize: int = 4, **options: Any) -> KafkaRows:
    """A compacted topic of blocks of ``BLOCK_ROWS`` rows, in several parts each."""
    return compacted(broker, **{"row_block_bytes": BLOCK_ROWS * DIM * itemsize, "part_bytes": 3_000} | options)


@dataclass
class BlockRun:
    """A job, and what its newest checkpoint holds.

    Attributes:
        root, rows: Where it saves.
        options: Of its writers.
        dtype: Of its table.
        loaded: The table as the newest checkpoint has it, at which ``check`` has looked.
        num_saves: How many checkpoints it has tried to save.
        head: The newest checkpoint.
    """

    root: Path
    rows: KafkaRows
    options: dict[str, Any]
    dtype: torch.dtype
    loaded: Tensor = field(default_factory=lambda: torch.empty(0))
    num_saves: int = 0
    head: cnr.Checkpoint = field(init=False)

    def begin(self) -> None:
        """Begin as a new process does, with other weights."""
        self.model = nn.ModuleDict({_TABLE: nn.EmbeddingBag(NUM_ROWS, DIM, sparse=True, dtype=self.dtype)})
        with torch.no_grad():
            self.model.get_parameter(f"{_TABLE}.weight").copy_(few_dimensions(NUM_ROWS))
        self.tracker = cnr.RowTracker(self.model)
        self.planner = cnr.CNRSavePlanner(self.tracker, policy=cnr.OneShot())
        self.writer = models.writer(self.root / "unused", row_log=self.rows, **self.options)

    @property
    def table(self) -> Tensor:
        """The table."""
        weight: Tensor = self.model.get_parameter(f"{_TABLE}.weight")
        return weight.detach()

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model.state_dict()}

    def change(self, block: int, scale: float = 1.0, num_rows: int = BLOCK_ROWS, seed: int | None = None) -> None:
        """Overwrite rows of a block by others of this scale."""
        rows = torch.arange(block * BLOCK_ROWS, min(block * BLOCK_ROWS + num_rows, NUM_ROWS))
        seed = 100 * self.num_saves + block if seed is None else seed
        self.table[rows] = (scale * few_dimensions(len(rows), seed)).to(self.dtype)
        self.tracker.mark(_TABLE, rows)

    def save(self, *, is_async: bool = False) -> cnr.Checkpoint:
        """Save, and return the checkpoint."""
        path = self.root / f"step-{self.num_saves}"
        self.num_saves += 1
        if is_async:
            models.save_behind(self.state, str(path), self.writer, self.planner).result()
        else:
            dcp.save(self.state, checkpoint_id=path, storage_writer=self.writer, planner=self.planner, no_dist=True)
        self.head = cnr.read_checkpoint(path)
        return self.head

    def save_and_check(self, *, is_async: bool = False) -> cnr.Checkpoint:
        """Save and check."""
        checkpoint = self.save(is_async=is_async)
        self.check()
        return checkpoint

    def load(self) -> Tensor:
        """The table as the newest checkpoint has it."""
        return cnr.load_table(self.head.store.url, FQN, row_log=self.rows)

    def check(self) -> None:
        """Rows that were kept are as they were; the others are as near as the rule says. Nothing is corrupt."""
        loaded, url = self.load(), self.head.store.url
        assert cnr.verify(url, row_log=self.rows).problems == ()
        others = ~self.written()
        assert not others.any() or not differing({"": loaded[others]}, {"": self.loaded[others]})
        errors = (loaded.double() - self.table.double()).norm(dim=1)
        lineage = read_lineage(Store.open(url, row_log=self.rows))
        shards = [shard for each in lineage.checkpoints for shard in each.manifest.tensors[FQN].shards]
        is_uniform = any(shard.blobs and not isinstance(shard.scheme, Transformed) for shard in shards)
        norms = self.table.double().norm(dim=1) * (LARGEST_SHARE if is_uniform else 0)
        most = torch.clamp(norms, min=largest_errors(url, row_log=self.rows)[FQN])
        wrong = errors.isfinite() & (errors > most)
        assert not wrong.any(), (self.num_saves, wrong.nonzero().flatten().tolist())
        self.loaded = loaded

    def written(self) -> Tensor:
        """The rows, bool, of the blocks that the newest checkpoint's save has written; all if that is a baseline."""
        manifest = self.head.committed
        written = torch.full((NUM_ROWS,), manifest.parent is None)
        for shard in manifest.tensors[FQN].shards:
            for block, blob in zip(shard.rows.blocks, shard.blobs, strict=True):
                if manifest.packs[blob.pack].name.startswith(manifest.save_id):
                    written[block.first : block.first + block.span] = True
        return written

    @property
    def written_blocks(self) -> set[int]:
        """The numbers of the blocks that have such rows."""
        return {int(row) // BLOCK_ROWS for row in self.written().nonzero()}

    def restart(self) -> None:
        """Go on from the newest checkpoint as a new process does."""
        self.go_on_from(Path(self.head.store.path).name)

    def go_on_from(self, name: str) -> None:
        """Go on from a checkpoint as a new process does."""
        self.close()
        self.begin()
        path = self.root / name
        reader = cnr.CNRStorageReader(path, row_log=self.rows)
        dcp.load(self.state, storage_reader=reader, planner=cnr.CNRLoadPlanner(self.tracker), no_dist=True)
        self.head = cnr.read_checkpoint(path)
        self.loaded = self.load()
        assert not differing({"": self.loaded}, {"": self.table})

    def close(self) -> None:
        """Give back what it took."""
        self.writer.close()
        self.tracker.close()


@contextmanager
def block_run(root: Path, broker: Broker, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[BlockRun]:
    """A job whose baseline is committed."""
    rows = block_topic(broker, dtype.itemsize)
    run = BlockRun(root, rows, {"quantization": RULE} | options, dtype)
    run.begin()
    run.save_and_check()
    yield run
    run.close()


def shards_of(checkpoint: cnr.Checkpoint) -> tuple[Shard, ...]:
    """The shards of the table, all of which are transform-coded."""
    shards = checkpoint.committed.tensors[FQN].shards
    assert all(isinstance(shard.scheme, Transformed) and shard.blobs for shard in shards)
    return shards


def directories_of(shards: Sequence[Shard], checkpoint: cnr.Checkpoint) -> set[str | None]:
    """Where transforms and bases of shards are."""
    return {checkpoint.committed.packs[blob.pack].directory for shard in shards for blob in shard.transform_blobs}
