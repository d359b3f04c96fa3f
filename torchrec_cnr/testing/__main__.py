"""The command ``python -m torchrec_cnr.testing <url>``, which checks whether a file system can hold checkpoints."""

import argparse
import sys
from collections.abc import Sequence

from torchrec_cnr.errors import CNRError
from torchrec_cnr.testing.checks import LARGE_BYTES
from torchrec_cnr.testing.conformance import NUM_FAULTS, conformance_checks, run_conformance

_MIB = 1 << 20


def main(words: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of this process, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrec_cnr.testing",
        description="Check whether a file system meets the requirements of checkpoints. Each check works in a new "
        "directory below the URL, and removes it afterwards. Nothing else there is changed.",
        epilog="Exit status: 0 if all checks pass, 1 if one fails, 2 if the URL cannot be opened or no check matches.",
    )
    parser.add_argument("url", help="a directory as a path or fsspec URL, such as s3://bucket/tests")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only checks whose name contains this text")
    parser.add_argument(
        "--faults",
        metavar="N",
        type=int,
        default=NUM_FAULTS,
        help="number of round trips with each kind of fault (default: %(default)s)",
    )
    parser.add_argument(
        "--large-mib",
        metavar="N",
        type=int,
        default=LARGE_BYTES // _MIB,
        help="size of the large file, in MiB (default: %(default)s)",
    )
    arguments = parser.parse_args(words)
    selected = conformance_checks(num_faults=arguments.faults, large_bytes=arguments.large_mib * _MIB)
    selected = [check for check in selected if arguments.only in check.name]
    if not selected:
        parser.error(f"no check has {arguments.only!r} in its name")
    out = sys.stdout
    num_broken = 0
    try:
        for outcome in run_conformance(arguments.url, selected):
            num_broken += outcome.problem is not None
            word = "passed" if outcome.problem is None else "FAILED"
            out.write(f"{word:<7} {outcome.check.name:<24} {outcome.secs:6.2f} s  {outcome.check.promise}\n")
            if outcome.problem is not None:
                out.write(f"        {outcome.problem}\n")
            out.flush()
    except CNRError as error:
        parser.error(str(error))
    out.write(f"checks: {len(selected) - num_broken} passed, {num_broken} failed\n")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
