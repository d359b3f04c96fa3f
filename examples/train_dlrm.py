"""Train TorchRec's DLRM on clicks and checkpoint it with torchrec_cnr; ``--help`` lists the options.

Under torchrun this process is one rank. Otherwise it starts the ranks itself and waits for them. If a rank is killed,
its exit status is 128 plus the signal's number, as in a shell.
"""

import os
import signal
import sys
from pathlib import Path

from checkpoint_places import check_root
from click_data import open_stream
from delimited import DataError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from train_options import Options, fail, parse_options


def main() -> None:
    """Parse the options, check the data, then train as a rank or start the ranks."""
    arguments = sys.argv[1:]
    options = parse_options(arguments)
    try:
        options.check_world_size(int(os.environ.get("WORLD_SIZE", options.world_size)))
        check_root(options.root, options.resume)
        if "RANK" in os.environ:
            run_rank(options)
        else:
            open_stream(options.format, options.data, options.seed)
            start_ranks(options, arguments)
    except DataError as error:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2) from None  # rank 0 prints the error
        fail(str(error))


def run_rank(options: Options) -> None:
    """Train as the rank that torchrun has assigned to this process."""
    # Imported here, because it takes seconds, and the process that starts the ranks does not need it.
    from dlrm_training import train  # noqa: PLC0415

    train(options)
    # DDP keeps gloo's threads alive after destroy_process_group. If such a thread frees a tensor while Python shuts
    # down, it needs the GIL and aborts the process. So the process exits without a shutdown of Python.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def start_ranks(options: Options, arguments: list[str]) -> None:
    """Start the ranks as ``torchrun --standalone --nproc-per-node N`` does, and exit if a rank fails."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.world_size,
        run_id="train_dlrm",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    script = Path(__file__).resolve()
    try:
        elastic_launch(config, sys.executable)(str(script), *arguments)
    except ChildFailedError as error:
        # Ranks that lose their peer fail, too, so a rank that was killed is reported first.
        failures = sorted(error.failures.items(), key=lambda item: item[1].exitcode != -signal.SIGKILL)
        rank, status = failures[0][0], failures[0][1].exitcode
        ended = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
        print(f"train_dlrm.py: rank {rank} {ended}", file=sys.stderr)
        raise SystemExit(128 - status if status < 0 else status) from None


if __name__ == "__main__":
    main()
