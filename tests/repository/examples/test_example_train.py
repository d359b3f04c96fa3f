"""The example's training runs, as processes: killed in the middle of a save and resumed, they go on as if nothing was.

A run that nobody kills is the yardstick. Rows are saved exactly here, so a run that was killed and resumed on the same
number of ranks must give the same losses and the same final state, bit for bit.
"""

import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from train_options import parse_options

from tests.repository.examples.example_runs import ROOT, Ended, run, succeed

pytestmark = pytest.mark.long

TRAIN = str(ROOT / "examples" / "train_dlrm.py")
KILLED_STATUS = 137
STEPS, EVERY = 12, 3
EXACT = [
    *("--num-rows", "3000", "--dim", "8", "--batch-size", "128", "--bits", "32"),
    *("--steps", str(STEPS), "--every", str(EVERY)),
]
# Any save but the first, before which there is nothing to resume from.
CRASH_AT = random.Random(20221).choice(range(2 * EVERY, STEPS + 1, EVERY))


@dataclass(frozen=True)
class Killed:
    """A run on two ranks that died in a save.

    Attributes:
        ended: How.
        folder: Its files: ``checkpoints``, and ``losses.txt``.
    """

    ended: Ended
    folder: Path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A run on two ranks under torchrun that nobody kills, and its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    places = ["--root", str(folder / "checkpoints"), "--losses", str(folder / "losses.txt")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return succeed(*torchrun, TRAIN, *EXACT, *places), folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The same, started by the script itself, and killed in the middle of a save."""
    folder = tmp_path_factory.mktemp("killed")
    places = ["--root", str(folder / "checkpoints"), "--losses", str(folder / "losses.txt")]
    return Killed(run(TRAIN, *EXACT, *places, "--world-size", "2", "--crash-at", str(CRASH_AT)), folder)


@pytest.fixture(scope="module")
def resumed(killed: Killed, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """A copy of the killed run, resumed on two ranks as before: how that ended, and its folder."""
    return resume(killed, tmp_path_factory.mktemp("resumed") / "on-2", world_size=2)


@pytest.mark.slow
def test_saves_behind_training_resume_alike(undisturbed: tuple[Ended, Path], tmp_path: Path) -> None:
    """Killed in a save behind training, and resumed: the run ends as one that waits for its saves and is not killed."""
    options = [*EXACT, "--root", str(tmp_path / "checkpoints"), "--losses", str(tmp_path / "losses.txt"), "--async"]
    ended = run(TRAIN, *options, "--world-size", "2", "--crash-at", str(CRASH_AT))
    assert ended.status == KILLED_STATUS, ended.errors[-4000:]
    again = succeed(TRAIN, *options, "--world-size", "2", "--resume")
    assert again.digest == undisturbed[0].digest
    assert losses(tmp_path) == losses(undisturbed[1])


def resume(killed: Killed, folder: Path, world_size: int) -> tuple[Ended, Path]:
    """Copy the killed run into ``folder`` and resume it there."""
    shutil.copytree(killed.folder, folder)
    places = ["--root", str(folder / "checkpoints"), "--losses", str(folder / "losses.txt")]
    report = ["--report", str(folder / "report.png")]
    return succeed(TRAIN, *EXACT, *places, *report, "--resume", "--world-size", str(world_size)), folder


def losses(folder: Path) -> list[float]:
    """A run's losses by step."""
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, len(lines) + 1))
    return [float.fromhex(loss) for _, loss in lines]


def test_the_kill_hits_the_middle_of_a_save(killed: Killed) -> None:
    """SIGKILL ends the run when data of the save are on disk and its manifest is not."""
    assert killed.ended.status == KILLED_STATUS, killed.ended.errors[-4000:]
    half_written = killed.folder / "checkpoints" / f"step-{CRASH_AT}"
    assert any(path.stat().st_size for path in half_written.iterdir())
    assert not (half_written / "manifest.json").exists()
    assert (half_written.with_name(f"step-{CRASH_AT - EVERY}") / "manifest.json").exists()


def test_a_run_killed_in_a_save_and_resumed_is_bit_exact(
    undisturbed: tuple[Ended, Path], resumed: tuple[Ended, Path]
) -> None:
    """Resumed on as many ranks, every loss and the final state are those of a run that nobody killed."""
    (yardstick, yardstick_folder), (ended, folder) = undisturbed, resumed
    assert f"resumed from {folder}/checkpoints/step-{CRASH_AT - EVERY}," in ended.output
    assert (folder / "losses.txt").read_text() == (yardstick_folder / "losses.txt").read_text()
    assert len(losses(folder)) == STEPS
    assert ended.digest == yardstick.digest


def test_a_resumed_run_reports_the_checkpoints_of_both_runs(resumed: tuple[Ended, Path]) -> None:
    """The summary counts every committed checkpoint, and the picture is there."""
    ended, folder = resumed
    assert f"\n{STEPS // EVERY} checkpoints take " in ended.output
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_resumes_on_another_number_of_ranks(
    undisturbed: tuple[Ended, Path], killed: Killed, tmp_path: Path
) -> None:
    """One rank continues what two began: the next samples, and losses that differ by rounding only."""
    ended, folder = resume(killed, tmp_path / "on-1", world_size=1)
    assert "saved by 2 ranks" in ended.output
    assert losses(folder) == pytest.approx(losses(undisturbed[1]), rel=1e-4)


def test_resuming_with_other_tables_says_which_differ(killed: Killed, tmp_path: Path) -> None:
    """A wrong --num-rows is found before anything is loaded, and named."""
    shutil.copytree(killed.folder, tmp_path / "copy")
    root = ["--root", str(tmp_path / "copy" / "checkpoints")]
    ended = run(TRAIN, *EXACT, *root, "--resume", "--world-size", "1", "--num-rows", "4000")
    assert ended.status == 2
    assert "has article_id of size (3000, 8), these options make (4000, 8)" in ended.errors
    assert "Traceback" not in ended.errors


def test_a_second_run_does_not_mix_with_the_first(killed: Killed) -> None:
    """Without --resume, a root that holds checkpoints is refused."""
    ended = run(TRAIN, *EXACT, "--root", str(killed.folder / "checkpoints"), "--world-size", "1")
    assert ended.status == 2
    expected = "checkpoints already contains checkpoints; continue with --resume, or give another --root\n"
    assert ended.errors.endswith(expected)
    assert ended.errors.count("\n") == 1


def test_a_batch_that_ranks_cannot_share_is_one_line_and_status_2(tmp_path: Path) -> None:
    """A step must give every rank equally many samples."""
    ended = run(TRAIN, "--root", str(tmp_path), "--batch-size", "5", "--world-size", "2")
    assert ended.status == 2
    assert ended.errors == "train_dlrm.py: error: --batch-size 5 is not divisible by 2 ranks\n"


def test_nothing_to_resume_from_is_one_line_and_status_2(tmp_path: Path) -> None:
    """A mistyped --root does not start a training run from scratch."""
    ended = run(TRAIN, "--root", str(tmp_path / "mistyped"), "--resume")
    assert ended.status == 2
    assert ended.errors == f"train_dlrm.py: error: {tmp_path / 'mistyped'} contains no checkpoint to resume from\n"


def test_a_missing_file_is_one_line_and_status_2(tmp_path: Path) -> None:
    """The process that starts the ranks looks at the data first, so nothing else is printed."""
    ended = run(TRAIN, "--root", str(tmp_path / "root"), "--format", "clicks", "--data", str(tmp_path / "gone.csv"))
    assert ended.status == 2
    assert ended.errors == f"train_dlrm.py: error: {tmp_path / 'gone.csv'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --root"),
        (["--root", "r", "--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--root", "r", "--steps", "many"], "--steps: invalid whole number from 1 up value: 'many'"),
        (["--root", "r", "--bits", "5"], "--bits: invalid choice: 5"),
        (["--root", "r", "--policy", "daily"], "--policy: invalid choice: 'daily'"),
        (["--root", "r", "--dim", "12"], "--dim must be a multiple of 8"),
        (
            ["--root", "r", "--crash-at", "7"],
            "--crash-at must be a step with a checkpoint (every 10, or the last, 100)",
        ),
        (["--root", "r", "--crash-at", "110"], "--crash-at must be a step with a checkpoint"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, and where help is; no usage, no traceback."""
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who asks for help sees calls to copy."""
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    assert "torchrun --nproc-per-node 2 examples/train_dlrm.py" in capsys.readouterr().out


def test_a_model_is_served_while_it_is_trained(tmp_path: Path) -> None:
    """The served model follows a run to its last checkpoint, and answers requests meanwhile."""
    sizes = ["--steps", "12", "--every", "4", "--num-rows", "3000", "--batch-size", "128"]
    output = succeed(str(ROOT / "examples" / "serve_dlrm.py"), "--root", str(tmp_path / "run"), *sizes).output
    assert "then step-12, a " in output
    assert output.splitlines()[-1].startswith("   100 requests, mean loss 0.")


@pytest.mark.slow
def test_the_demo_runs_twice_in_one_folder(tmp_path: Path) -> None:
    """The whole story holds, and a second run replaces the first."""
    for _ in range(2):
        arguments = ["--steps", "60", "--crash-at", "40", "--num-rows", "50000"]
        ended = succeed(str(ROOT / "examples" / "demo.py"), "--output", str(tmp_path / "demo"), *arguments)
        assert "reading it:  CheckpointNotFoundError" in ended.output
        assert (tmp_path / "demo" / "checkpoints.png").exists()


def test_the_demo_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    """A folder with files that no demo made is refused, and its files stay."""
    (tmp_path / "thesis.txt").write_text("years of work")
    ended = run(str(ROOT / "examples" / "demo.py"), "--output", str(tmp_path))
    assert ended.status == 1
    assert "contains files that no demo has written" in ended.errors
    assert (tmp_path / "thesis.txt").exists()
