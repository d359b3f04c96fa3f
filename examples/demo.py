"""The whole story in about a minute: train, be killed in the middle of a save, resume elsewhere, finish.

A DLRM trains on made-up clicks on two ranks and saves small 4-bit deltas. One rank is killed with SIGKILL when it has
written its part of a checkpoint and nothing is committed. A single rank resumes from the checkpoint before, and
finishes. A run that nobody killed is the yardstick. Everything lies in ``demo_output/`` and is made anew each time.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from checkpoint_places import step_path
from checkpoint_report import TABLE_HEAD, human_bytes, read_records, summary

import torchrec_cnr as cnr

EXAMPLES = Path(__file__).resolve().parent
KILLED_STATUS = 128 + signal.SIGKILL
RUN_LIMIT_SECS = 900
NUM_LAST_STEPS = 20
EVERY = 10
GIT_IGNORE = "# Made by examples/demo.py.\n*\n"


def main() -> None:
    """Run the story; ends with exit status 1 at the first thing that is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=EXAMPLES.parent / "demo_output", help="folder for all files")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--crash-at", type=int, default=110, help="step whose save is killed; a multiple of 10")
    parser.add_argument("--num-rows", type=int, default=100_000, help="rows of each large table")
    args = parser.parse_args()
    started = time.monotonic()
    clear(args.output)
    Demo(args.output, args.steps, args.crash_at, args.num_rows).run()
    print(f"\nDone in {time.monotonic() - started:.0f} s.")


class Demo:
    """The story's chapters, in the folder ``output``."""

    def __init__(self, output: Path, steps: int, crash_at: int, num_rows: int) -> None:
        self._output = output
        self._root = output / "checkpoints"
        self._png = output / "checkpoints.png"
        self._steps, self._crash_at = steps, crash_at
        self._common = ["--every", str(EVERY), "--steps", str(steps), "--num-rows", str(num_rows)]

    def run(self) -> None:
        """All chapters."""
        self._train_until_killed()
        self._inspect_half_written()
        self._resume_and_finish()
        self._compare_with_undisturbed_run()
        self._show_all_checkpoints()

    def _train_until_killed(self) -> None:
        chapter(1, f"Two ranks train. Rank 1 gets SIGKILL in the middle of the save of step {self._crash_at}.")
        arguments = ["--root", str(self._root), "--losses", str(self._output / "losses.txt")]
        status = self._train("killed", [*arguments, "--world-size", "2", "--crash-at", str(self._crash_at)])
        expect(status == KILLED_STATUS, f"the run should end with exit status {KILLED_STATUS}, got {status}")
        print("  → killed")

    def _inspect_half_written(self) -> None:
        chapter(2, "What is left of that save is no checkpoint, because a checkpoint is its manifest.")
        half_written = step_path(self._root, self._crash_at)
        for path in sorted(half_written.iterdir()):
            print(f"  {path.relative_to(self._output)}  {human_bytes(path.stat().st_size)}")
        try:
            cnr.read_checkpoint(half_written)
            fail("a half-written directory was read as a checkpoint")
        except cnr.CheckpointNotFoundError as error:
            print(f"  reading it:  {type(error).__name__}: {error}")
        head = cnr.latest(str(self._root))
        print(f"  the newest checkpoint:  {head}")
        expected = step_path(self._root, self._crash_at - EVERY)
        expect(head is not None and Path(head) == expected, f"the newest checkpoint should be {expected}")

    def _resume_and_finish(self) -> None:
        chapter(3, "One rank resumes from the newest checkpoint, at the very next sample, and finishes.")
        arguments = ["--root", str(self._root), "--losses", str(self._output / "losses.txt")]
        status = self._train("resumed", [*arguments, "--world-size", "1", "--resume", "--report", str(self._png)])
        expect(status == 0, f"the resumed run should succeed, got exit status {status}")

    def _compare_with_undisturbed_run(self) -> None:
        chapter(4, "The same training on two ranks that nobody kills, with exact full checkpoints, as a yardstick.")
        losses = self._output / "losses-undisturbed.txt"
        exact = ["--root", str(self._output / "checkpoints-undisturbed"), "--bits", "32", "--policy", "full"]
        status = self._train("undisturbed", [*exact, "--losses", str(losses), "--world-size", "2"], shown=False)
        expect(status == 0, f"the undisturbed run should succeed, got exit status {status}")
        ours, theirs = read_losses(self._output / "losses.txt"), read_losses(losses)
        lengths = [len(ours), len(theirs)]
        expect(lengths == [self._steps] * 2, f"both runs should have {self._steps} losses, got {lengths}")
        last, undisturbed = mean(ours[-NUM_LAST_STEPS:]), mean(theirs[-NUM_LAST_STEPS:])
        print(f"  mean loss of the first {NUM_LAST_STEPS} steps          {mean(ours[:NUM_LAST_STEPS]):.4f}")
        print(f"  of the last {NUM_LAST_STEPS}, killed and resumed        {last:.4f}")
        print(f"  of the last {NUM_LAST_STEPS}, undisturbed and exact     {undisturbed:.4f}")
        expect(last < mean(ours[:NUM_LAST_STEPS]) - 0.02, "the loss should have fallen")
        expect(abs(last - undisturbed) < 0.01, "a killed run should end where an undisturbed one does")

    def _show_all_checkpoints(self) -> None:
        chapter(5, "All checkpoints of both runs, read back from their manifests.")
        records = read_records(self._root)
        print("\n".join([TABLE_HEAD, *(record.line() for record in records)]))
        print(f"  {summary(records)}")
        print(f"  picture: {self._png}")
        steps = [record.step for record in records]
        expected = list(range(EVERY, self._steps + 1, EVERY))
        expect(steps == expected, f"there should be checkpoints of steps {expected}, got {steps}")
        expect({record.kind for record in records} == {"baseline", "delta"}, "there should be a baseline and deltas")
        expect(all(record.ratio > 2 for record in records), "every checkpoint should be smaller than half a full one")
        expect(self._png.exists(), "there should be a picture")

    def _train(self, name: str, arguments: Sequence[str], shown: bool = True) -> int:
        """Run train_dlrm.py; its messages of errors go to a log of their own. Returns its exit status."""
        command = [sys.executable, str(EXAMPLES / "train_dlrm.py"), *self._common, *arguments]
        log = self._output / f"{name}.log"
        with log.open("w") as errors:
            output = None if shown else errors
            run = subprocess.run(command, stdout=output, stderr=errors, timeout=RUN_LIMIT_SECS, check=False)
        if run.returncode not in (0, KILLED_STATUS):
            print(log.read_text()[-4000:], file=sys.stderr)
        return run.returncode


def clear(output: Path) -> None:
    """Make an empty folder; one with files that no demo made is left alone."""
    marker = output / ".gitignore"
    is_ours = marker.exists() and marker.read_text() == GIT_IGNORE
    if output.exists() and any(output.iterdir()) and not is_ours:
        fail(f"{output} holds files that are not of a demo; give another --output")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    marker.write_text(GIT_IGNORE)


def chapter(number: int, text: str) -> None:
    """Print what comes next."""
    print(f"\n{number}. {text}", flush=True)


def read_losses(path: Path) -> list[float]:
    """The losses of a --losses file; its steps must count from 1 without a gap."""
    steps, losses = zip(*(line.split() for line in path.read_text().splitlines()), strict=True)
    expect([int(step) for step in steps] == list(range(1, len(steps) + 1)), f"{path}: a step is missing or double")
    return [float.fromhex(loss) for loss in losses]


def mean(numbers: Sequence[float]) -> float:
    """Their arithmetic mean."""
    return sum(numbers) / len(numbers)


def expect(holds: bool, otherwise: str) -> None:
    """End the demo unless something holds."""
    if not holds:
        fail(otherwise)


def fail(why: str) -> NoReturn:
    """End the demo with exit status 1."""
    print(f"demo.py: {why}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
