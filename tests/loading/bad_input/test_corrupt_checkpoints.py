"""Broken lineages and corrupt bytes: each is refused by a typed error, and the job goes on."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.loading.bad_input.mishaps import adopt, forge, goes_on, load_failure, manifest
from tests.support import faults, models
from tests.support.jobs import SavingJob, save
from tests.support.models import Job, Whole, differing, plain_job, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _remove(run: SavingJob, number: int) -> None:
    shutil.rmtree(run.path(number))


def _replace_by_foreign(run: SavingJob, number: int) -> None:
    """Another run's checkpoint, of the same model, under the same name."""
    _remove(run, number)
    with SavingJob(run.root, seed=77) as foreign:
        foreign.save(number)
    forge(run.path(number), lambda body: body.update(created_ns=1 + number))  # older than its child


def _replace_by_sibling(run: SavingJob, number: int) -> None:
    """A checkpoint of the same run under the name of another."""
    _remove(run, number)
    shutil.copytree(run.path(2), run.path(number))


def _damage_manifest(run: SavingJob, number: int) -> None:
    faults.flip_middle(manifest(run, number))


def _empty_manifest(run: SavingJob, number: int) -> None:
    manifest(run, number).write_bytes(b"")


def _remove_manifest(run: SavingJob, number: int) -> None:
    manifest(run, number).unlink()


@pytest.mark.parametrize("number", [0, 1], ids=["baseline", "middle"])
@pytest.mark.parametrize(
    "spoil",
    [_remove, _replace_by_foreign, _replace_by_sibling, _damage_manifest, _empty_manifest, _remove_manifest],
    ids=lambda spoil: spoil.__name__.strip("_").replace("_", " "),
)
def test_a_spoiled_parent_is_refused_and_the_next_save_does_not_build_on_it(
    run: SavingJob, spoil: Callable[[SavingJob, int], None], number: int
) -> None:
    """Loading the head names the parent; a job that still runs saves a checkpoint that loads."""
    spoil(run, number)
    for path in (run.path(2), run.path(1)):
        if path != run.path(number):
            message = load_failure(path)
            assert message.startswith("DamagedError")
            assert run.path(number) in message
    goes_on(run, last=None if number == 0 else 0)


def test_a_lineage_of_links_that_do_not_fit_each_other_is_refused(run: SavingJob, tmp_path: Path) -> None:
    """Digests may be right and yet a parent's table be smaller, or of another dtype: nothing is half filled."""
    for number, change in enumerate((_fewer_rows, _fewer_columns, _other_dtype)):
        root = tmp_path / f"forged-{number}"
        shutil.copytree(run.root, root)
        model = change(plain_job(1, "adagrad").model)
        shutil.rmtree(root / "0")
        saved = state(Job(model, {"all": torch.optim.Adagrad(model.parameters())}, lambda _: None))
        save(saved, root / "0")
        digest = forge(str(root / "0"), lambda body: body.update(created_ns=1))  # a parent is older
        adopt(f"{root}/2", adopt(f"{root}/1", digest))
        message = load_failure(f"{root}/2")
        assert message.startswith("DamagedError")
        assert re.search(r"/0: tensor '(model|all_optimizer)\..* of it; use another checkpoint", message), message
    goes_on(run)


def _fewer_rows(model: nn.Module) -> nn.Module:
    model.bag = nn.EmbeddingBag(30, 4)
    return model


def _fewer_columns(model: nn.Module) -> nn.Module:
    model.bag = nn.EmbeddingBag(40, 3)
    return model


def _other_dtype(model: nn.Module) -> nn.Module:
    return model.half()


# Damaged bytes.


def _files(root: str, number: int) -> list[Path]:
    return sorted(Path(root, str(number)).iterdir())


def test_a_truncated_pack_is_refused(run: SavingJob) -> None:
    """A pack that is short by one byte, half gone, or gone: the error names it."""
    for number in (0, 2):
        (pack,) = (file for file in _files(run.root, number) if file.suffix == ".safetensors")
        content = pack.read_bytes()
        for size in (len(content) - 1, len(content) // 2, 100, 4, 0, None):
            if size is None:
                pack.unlink()
            else:
                pack.write_bytes(content[:size])
            message = load_failure(run.path(2)) if number == 2 else load_failure(run.path(0))
            assert message.startswith("DamagedError")
            assert str(pack) in message
            pack.write_bytes(content)
    goes_on(run)


def _flip_bits(root: str, head: Whole, seed: int, num_flips: int) -> None:
    """Flip bits all over a lineage, one at a time, as many in each file."""
    files = [(number, file) for number in range(3) for file in _files(root, number)]
    assert len(files) == 6
    rng = random.Random(seed)
    target = plain_job(99, "adagrad")
    for index in range(num_flips):
        number, file = files[index % len(files)]
        size = file.stat().st_size
        # Every file's first bytes, its header's length for one, are worth a look each.
        bit = rng.randrange(8 * min(size, 16)) if index % 4 == 0 else rng.randrange(8 * size)
        faults.flip(file, bit // 8, bit % 8)
        where = f"bit {bit} of {file}"
        message = load_failure(f"{root}/{number}", target=state(target))
        assert message.startswith(("DamagedError", "VersionError")), where
        assert str(file) in message, where
        _load_head_or_refuse(root, file, head, where)
        faults.flip(file, bit // 8, bit % 8)


def _load_head_or_refuse(root: str, file: Path, expected: Whole, where: str) -> None:
    """What a newer checkpoint holds anew is not read from older ones: then the head is right; else it is refused."""
    job = plain_job(98, "adagrad")
    try:
        got = models.load(job, f"{root}/2")
    except CheckpointException as error:
        (cause,) = faults.causes(error).values()
        assert isinstance(cause, cnr.DamagedError), where
        assert str(file) in str(cause), where
    else:
        assert file.suffix == ".safetensors", where
        assert differing(got, expected) == [], where


@pytest.mark.long
def test_a_flipped_bit_is_noticed(run: SavingJob) -> None:
    """One flipped bit anywhere in manifests and packs, headers too: the checkpoint is refused, the file is named."""
    _flip_bits(run.root, run.saved["2"], seed=1, num_flips=150)
    goes_on(run)


@pytest.mark.slow
def test_many_flipped_bits_are_noticed(run: SavingJob) -> None:
    """As above, at 1,000 places that change from run to run."""
    _flip_bits(run.root, run.saved["2"], seed=random.randrange(10**9), num_flips=1_000)
    goes_on(run)
