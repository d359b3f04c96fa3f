"""The life of a job whose tables are on a GPU: steps, deltas in the background, a restore in place, lookups.

Its process group is NCCL's alone, as in most jobs. On the CPU, one of the cases runs with gloo.
"""

import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import CacheParams, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_cnr as cnr

NUM_TABLES, NUM_ROWS, DIM = 3, 20_000, 64
NUM_IDS, NUM_EARLY_IDS = 500, 2_000
NUM_STEPS = 4
LIMIT_SECS = 300.0
SCHEMES = {"exact": cnr.NoQuantization(), "4 bits": cnr.AdaptiveAsymmetric(4)}
gpu = pytest.mark.gpu
CASES = [("cpu", "fused", "FP32", "4 bits")] + [
    pytest.param("cuda", *case, marks=gpu)
    for case in product(("fused", "fused_uvm", "fused_uvm_caching"), ("FP32", "FP16"), SCHEMES)
]


@dataclass(eq=False)
class Trained:
    """A sharded model with a generator of ids."""

    model: DistributedModelParallel
    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, kernel: str, dtype: DataType) -> "Trained":
        """Tables of one kernel, on the only rank of the present group."""
        names = [f"t{index}" for index in range(NUM_TABLES)]
        bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[f"f_{name}"], data_type=dtype
                )
                for name in names
            ],
        )
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
        generators = dict.fromkeys(names, table_wise(rank=0, compute_kernel=kernel))
        plan = construct_module_sharding_plan(bags, generators, local_size=1, world_size=1, device_type=device.type)
        if kernel == "fused_uvm_caching":
            for sharding in plan.values():
                sharding.cache_params = CacheParams(load_factor=0.02)  # most rows are not in the cache
        model = DistributedModelParallel(
            nn.Sequential(bags),
            env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            device=device,
            plan=ShardingPlan({"0": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        return cls(model, device, torch.Generator(device).manual_seed(0))

    def state(self) -> dict[str, Any]:
        """What a trainer passes to the manager."""
        return {"model": self.model.state_dict(), "optim": self.model.fused_optimizer.state_dict()}

    def look_up(self, ids: Tensor) -> Tensor:
        """The pooled rows of ids, int64 [NUM_TABLES, N]: [N, NUM_TABLES * DIM]."""
        lengths = torch.ones(ids.numel(), dtype=torch.int64, device=self.device)
        features = KeyedJaggedTensor([f"f_t{index}" for index in range(NUM_TABLES)], ids.flatten(), lengths=lengths)
        return torch.as_tensor(self.model(features).wait().values())

    def step(self, num_ids: int = NUM_IDS) -> Tensor:
        """Train once; returns the ids, int64 [NUM_TABLES, num_ids]."""
        ids = torch.randint(NUM_ROWS, (NUM_TABLES, num_ids), device=self.device, generator=self.generator)
        self.look_up(ids).square().sum().backward()
        return ids

    def rows(self) -> list[Tensor]:
        """Each table as lookups see it."""
        every = torch.arange(NUM_ROWS, device=self.device).expand(NUM_TABLES, -1)
        self.model.eval()
        with torch.no_grad():
            found = self.look_up(every).clone()
        self.model.train()
        return list(found.split(DIM, dim=1))


def in_a_process(act: Callable[..., Any], device: str, folder: Path, *args: Any) -> Any:
    """Call a function with a device in a new process: one that was forked could not use a GPU."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(in_a_group, (act, device, str(folder), *args)).get(timeout=LIMIT_SECS)


def in_a_group(act: Callable[..., Any], device_name: str, folder: str, *args: Any) -> Any:
    """Call a function with a device in a process group of NCCL alone, or of gloo on the CPU."""
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.device_count() - 1)  # not the first if there are several
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        return act(device, folder, *args)
    finally:
        dist.destroy_process_group()


def live(device: torch.device, folder: str, kernel: str, dtype_name: str, scheme_name: str) -> list[str]:
    """Save while training goes on, restore in place, and look up; returns what went wrong."""
    trained = Trained.of(device, kernel, DataType[dtype_name])
    scheme = SCHEMES[scheme_name]
    root = Path(folder) / "run"
    tracker = cnr.RowTracker(trained.model, verify_untracked=True)
    wrong: list[str] = []
    early = torch.empty(NUM_TABLES, 0, dtype=torch.int64, device=device)
    policy = cnr.Consecutive()
    with closing(cnr.CheckpointManager(root, tracker, policy=policy, quantization=scheme, every_steps=1)) as manager:
        for step in range(NUM_STEPS):
            since_save = torch.cat((early, trained.step()), dim=1)
            expected = sum(len(ids.unique()) for ids in since_save)
            if tracker.num_modified != expected:
                wrong.append(f"step {step}: {tracker.num_modified} rows marked, {expected} trained")
            future = manager.async_save(step, trained.state())
            early = trained.step(NUM_EARLY_IDS) if step < NUM_STEPS - 1 else early[:, :0]
            if future is None:
                raise AssertionError(f"step {step}: no save was due")
            future.result()
            manager.wait()
        kinds = [cnr.read_checkpoint(path).kind for path in sorted(root.glob("step-*"))]
        if kinds != ["baseline", "delta", "delta", "delta"]:
            wrong.append(f"expected a baseline and deltas, got {kinds}")
        truth = [rows.clone() for rows in trained.rows()]
        for _ in range(3):
            trained.step()
        if all(torch.equal(rows, before) for rows, before in zip(trained.rows(), truth, strict=True)):
            wrong.append("training changed nothing")
        manager.restore(trained.state())
        newest = max(root.glob("step-*"))
        for index, (rows, before) in enumerate(zip(trained.rows(), truth, strict=True)):
            saved = cnr.load_table(newest, f"model.0.embedding_bags.t{index}.weight").to(device).float()
            expected_rows = before if scheme_name == "exact" else saved
            if not torch.equal(rows, expected_rows):
                wrong.append(
                    f"t{index}: {int((rows != expected_rows).any(1).sum())} rows looked up are not the saved ones"
                )
            if not torch.allclose(saved, before, atol=0.05):
                wrong.append(f"t{index}: saved rows are far from the trained ones")
    tracker.close()
    return wrong


@pytest.mark.timeout(LIMIT_SECS + 20)
@pytest.mark.parametrize(("device", "kernel", "dtype", "scheme"), CASES)
def test_life_of_a_job(tmp_path: Path, device: str, kernel: str, dtype: str, scheme: str) -> None:
    """Each save holds what was trained before it, rows trained during it are in the next, and a restore is exact."""
    assert in_a_process(live, device, tmp_path, kernel, dtype, scheme) == []


def synchronisations(device: torch.device, folder: str) -> tuple[int, int]:
    """How often a step of TorchRec's tables waits for the device, without the tracker and with it."""
    trained = Trained.of(device, "fused", DataType.FP32)

    def count() -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                trained.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len(found)

    trained.step()
    without = count()
    tracker = cnr.RowTracker(trained.model)
    trained.step()
    found = without, count()
    tracker.close()
    return found


@gpu
@pytest.mark.timeout(LIMIT_SECS + 20)
def test_a_step_of_torchrec_with_the_tracker_waits_no_more_often(tmp_path: Path) -> None:
    """The host runs ahead of the device as far as it does without the tracker."""
    without, tracked = in_a_process(synchronisations, "cuda", tmp_path)
    assert tracked == without
