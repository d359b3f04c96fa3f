"""A demonstration of about a minute: train, kill the run in the middle of a save, resume, and finish.

A DLRM trains on synthetic clicks on two ranks and saves small 4-bit deltas. One rank is killed with SIGKILL after it
has written its part of a checkpoint, and before the commit. A single rank resumes from the checkpoint before, and
finishes. Its results are compared with an uninterrupted run. All files are in ``demo_output/``, which is cleared first.
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
    """Run the demonstration; exit with status 1 at the first unexpected result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=EXAMPLES.parent / "demo_output", help="folder for all files")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--crash-at", type=int, default=110, help="step in whose save a rank is killed; multiple of 10")
    parser.add_argument("--num-rows", type=int, default=100_000, help="rows of each large table")
    args = parser.parse_args()
    started = time.monotonic()
    clear(args.output)
    Demo(args.output, args.steps, args.crash_at, args.num_rows).run()
    print(f"\nDone in {time.monotonic() - started:.0f} s.")


class Demo:
    """The chapters of the demonstration, with all files in the folder ``output``."""

    def __init__(self, output: Path, steps: int, crash_at: int, num_rows: int) -> None:
        self._output = output
        self._root = output / "checkpoints"
        self._png = output / "checkpoints.png"
        self._steps, self._crash_at = steps, crash_at
        self._common = ["--every", str(EVERY), "--steps", str(steps), "--num-rows", str(num_rows)]

    def run(self) -> None:
        """Run all chapters."""
        self._train_until_killed()
        self._inspect_half_written()
        self._resume_and_finish()
        self._compare_with_undisturbed_run()
        self._show_all_checkpoints()

    def _train_until_killed(self) -> None:
        chapter(1, f"Two ranks train. Rank 1 receives SIGKILL in the middle of the save of step {self._crash_at}.")
        arguments = ["--root", str(self._root), "--losses", str(self._output / "losses.txt")]
        status = self._train("killed", [*arguments, "--world-size", "2", "--crash-at", str(self._crash_at)])
        expect(status == KILLED_STATUS, f"exit status of the killed run: expected {KILLED_STATUS}, got {status}")
        print("  → killed")

    def _inspect_half_written(self) -> None:
        chapter(2, "The files of that save are not a checkpoint, because they have no manifest.")
        half_written = step_path(self._root, self._crash_at)
        for path in sorted(half_written.iterdir()):
            print(f"  {path.relative_to(self._output)}  {human_bytes(path.stat().st_size)}")
        try:
            cnr.read_checkpoint(half_written)
            fail("a directory without a manifest was read as a checkpoint")
        except cnr.CheckpointNotFoundError as error:
            print(f"  reading it:  {type(error).__name__}: {error}")
        head = cnr.latest(str(self._root))
        print(f"  the newest checkpoint:  {head}")
        expected = step_path(self._root, self._crash_at - EVERY)
        expect(head is not None and Path(head) == expected, f"newest checkpoint: expected {expected}, got {head}")

    def _resume_and_finish(self) -> None:
        chapter(3, "One rank resumes from the newest checkpoint, at the next sample, and finishes.")
        arguments = ["--root", str(self._root), "--losses", str(self._output / "losses.txt")]
        status = self._train("resumed", [*arguments, "--world-size", "1", "--resume", "--report", str(self._png)])
        expect(status == 0, f"exit status of the resumed run: expected 0, got {status}")

    def _compare_with_undisturbed_run(self) -> None:
        chapter(4, "For comparison, the same training on two ranks, uninterrupted, with exact full checkpoints.")
        losses = self._output / "losses-undisturbed.txt"
        exact = ["--root", str(self._output / "checkpoints-undisturbed"), "--bits", "32", "--policy", "full"]
        status = self._train("undisturbed", [*exact, "--losses", str(losses), "--world-size", "2"], shown=False)
        expect(status == 0, f"exit status of the uninterrupted run: expected 0, got {status}")
        ours, theirs = read_losses(self._output / "losses.txt"), read_losses(losses)
        lengths = [len(ours), len(theirs)]
        expect(lengths == [self._steps] * 2, f"losses of both runs: expected {self._steps} each, got {lengths}")
        last, undisturbed = mean(ours[-NUM_LAST_STEPS:]), mean(theirs[-NUM_LAST_STEPS:])
        print(f"  mean loss of the first {NUM_LAST_STEPS} steps          {mean(ours[:NUM_LAST_STEPS]):.4f}")
        print(f"  of the last {NUM_LAST_STEPS}, killed and resumed        {last:.4f}")
        print(f"  of the last {NUM_LAST_STEPS}, uninterrupted and exact   {undisturbed:.4f}")
        expect(last < mean(ours[:NUM_LAST_STEPS]) - 0.02, "the loss has not decreased by 0.02")
        expect(abs(last - undisturbed) < 0.01, "the losses of both runs differ by 0.01 or more")

    def _show_all_checkpoints(self) -> None:
        chapter(5, "All checkpoints of both runs, read back from their manifests.")
        records = read_records(self._root)
        print("\n".join([TABLE_HEAD, *(record.line() for record in records)]))
        print(f"  {summary(records)}")
        print(f"  picture: {self._png}")
        steps = [record.step for record in records]
        expected = list(range(EVERY, self._steps + 1, EVERY))
        expect(steps == expected, f"steps with a checkpoint: expected {expected}, got {steps}")
        expect({record.kind for record in records} == {"baseline", "delta"}, "a baseline or a delta is missing")
        expect(all(record.ratio > 2 for record in records), "a checkpoint is larger than half a full one")
        expect(self._png.exists(), f"the picture {self._png} is missing")

    def _train(self, name: str, arguments: Sequence[str], shown: bool = True) -> int:
        """Run train_dlrm.py, with its error output in a log file, and return its exit status."""
        command = [sys.executable, str(EXAMPLES / "train_dlrm.py"), *self._common, *arguments]
        log = self._output / f"{name}.log"
        with log.open("w") as errors:
            output = None if shown else errors
            run = subprocess.run(command, stdout=output, stderr=errors, timeout=RUN_LIMIT_SECS, check=False)
        if run.returncode not in (0, KILLED_STATUS):
            print(log.read_text()[-4000:], file=sys.stderr)
        return run.returncode


def clear(output: Path) -> None:
    """Create an empty folder, or clear it if an earlier demo has created it; raise an error for other folders."""
    marker = output / ".gitignore"
    is_ours = marker.exists() and marker.read_text() == GIT_IGNORE
    if output.exists() and any(output.iterdir()) and not is_ours:
        fail(f"{output} contains files that no demo has written; give another --output")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    marker.write_text(GIT_IGNORE)


def chapter(number: int, text: str) -> None:
    """Print the heading of a chapter."""
    print(f"\n{number}. {text}", flush=True)


def read_losses(path: Path) -> list[float]:
    """Read the losses of a --losses file, whose steps must count from 1 without a gap."""
    steps, losses = zip(*(line.split() for line in path.read_text().splitlines()), strict=True)
    expect([int(step) for step in steps] == list(range(1, len(steps) + 1)), f"{path}: a step is missing or repeated")
    return [float.fromhex(loss) for loss in losses]


def mean(numbers: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(numbers) / len(numbers)


def expect(holds: bool, otherwise: str) -> None:
    """End the demo with a message if a condition does not hold."""
    if not holds:
        fail(otherwise)


def fail(why: str) -> NoReturn:
    """End the demo with exit status 1."""
    print(f"demo.py: {why}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
