"""Serve an 8-bit DLRM while another process trains it: each checkpoint is applied to the live model.

This example starts train_dlrm.py on synthetic clicks in another process, and follows its folder of checkpoints. At the
same time, the served model answers requests, which are clicks that training has not seen yet. The loss of its answers
decreases with every checkpoint that it applies.
"""

import argparse
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from checkpoint_places import step_path
from checkpoint_report import human_bytes
from click_data import open_stream
from dlrm_model import build_dlrm, to_batch
from samples import global_batches
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.inference.modules import quantize_embeddings

import torchrec_cnr as cnr

EXAMPLES = Path(__file__).resolve().parent
DIM, SEED = 32, 0
REQUEST_SAMPLES = 512
PAUSE_SECS = 0.005  # between requests, to leave processor time to training


def main() -> None:
    """Train and serve until the last checkpoint is applied."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="training steps (default 100)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="steps between checkpoints (default 10)")
    parser.add_argument("--num-rows", type=int, default=100_000, metavar="N", help="rows of each large table")
    parser.add_argument("--batch-size", type=int, default=4096, metavar="N", help="samples per step (default 4096)")
    args = parser.parse_args()
    model = served_model(args.num_rows)
    requests = unseen_requests(args.steps * args.batch_size, args.num_rows)
    numbers = {name: str(getattr(args, name)) for name in ("steps", "every", "num_rows", "batch_size")}
    options = [word for name, number in numbers.items() for word in (f"--{name.replace('_', '-')}", number)]
    command = [sys.executable, str(EXAMPLES / "train_dlrm.py"), "--root", str(args.root), "--world-size", "1", *options]
    args.root.mkdir(parents=True, exist_ok=True)
    with (args.root / "training.log").open("w") as log:
        training = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        serve(model, args.root, requests, training, str(step_path(args.root.resolve(), args.steps)))
    finally:
        training.kill()
        training.wait()


def served_model(num_rows: int) -> nn.Module:
    """Create the served model, with random weights and 8-bit tables, not sharded."""
    stream = open_stream("synthetic", None, SEED)
    model = build_dlrm(stream, num_rows, DIM, torch.device("cpu"))
    served: nn.Module = quantize_embeddings(model, torch.qint8, inplace=True)
    return served.eval()


def unseen_requests(first: int, num_rows: int) -> Iterator[Batch]:
    """Yield clicks from a position that training does not reach."""
    stream = open_stream("synthetic", None, SEED)
    for samples in global_batches(stream, first, REQUEST_SAMPLES):
        yield to_batch(samples, stream.features, num_rows)


def serve(
    model: nn.Module, root: Path, requests: Iterator[Batch], training: "subprocess.Popen[bytes]", last: str
) -> None:
    """Answer requests, and print after each update the mean loss of the answers before it."""
    updates: queue.SimpleQueue[cnr.Applied] = queue.SimpleQueue()
    applied: cnr.Applied | None = None
    losses: list[float] = []
    with cnr.RowSubscriber(model, root, on_applied=updates.put):
        while applied is None or applied.path != last:
            if training.poll() not in (None, 0):
                raise SystemExit(f"training ended with exit status {training.poll()}, see {root}/training.log")
            with torch.no_grad():
                loss, _ = model(next(requests))
            losses.append(float(loss))
            time.sleep(PAUSE_SECS)
            if not updates.empty():
                applied = updates.get()
                print(f"{len(losses):6} requests, mean loss {sum(losses) / len(losses):.4f}; then {described(applied)}")
                losses.clear()
        with torch.no_grad():
            final = [float(model(next(requests))[0]) for _ in range(100)]
    print(f"   100 requests, mean loss {sum(final) / len(final):.4f}")


def described(update: cnr.Applied) -> str:
    """Return a short description of an update."""
    return (
        f"{Path(update.path).name}, a {update.kind} of {update.num_rows:,} rows and {human_bytes(update.num_bytes)}, "
        f"{update.committed_to_applied_secs:.2f} s after its commit; lookups waited {1e3 * update.apply_secs:.1f} ms"
    )


if __name__ == "__main__":
    main()
