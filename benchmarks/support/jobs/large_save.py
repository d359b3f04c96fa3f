"""A save of one large table to local files, in a process that does nothing else. It prints the peaks of memory as JSON.

A small table is saved before, because the first save of a process loads kernels, which takes memory once.
"""

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.tiled_rows import tiled
from benchmarks.support.process_memory import peak_mib
from torchrec_cnr.quantization import Quantization, Transformed

NUM_FIRST_ROWS = 20_000
RULES: Mapping[str, Quantization] = {
    "TransformCoded": cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
    "AdaptiveAsymmetric(4)": cnr.AdaptiveAsymmetric(4),
}


def main() -> None:
    """Save both tables; print the MiB of each save, and whether rows were transformed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="file of trained rows, which are repeated")
    parser.add_argument("--num-rows", type=int, required=True, help="rows of the table")
    parser.add_argument("--rule", choices=RULES, required=True, help="quantization rule")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    options = parser.parse_args()
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows, rule = torch.from_numpy(np.load(options.rows)), RULES[options.rule]
    first_mib = _save(tiled(rows, NUM_FIRST_ROWS), rule, options.folder / "first")
    table_mib = _save(tiled(rows, options.num_rows), rule, options.folder / "table")
    shard = cnr.read_checkpoint(str(options.folder / "table")).manifest.tensors["table"].shards[0]
    is_transformed = isinstance(shard.scheme, Transformed)
    print(json.dumps({"first": first_mib, "table": table_mib, "is_transformed": is_transformed}))


def _save(table: Tensor, rule: Quantization, path: Path) -> float:
    writer = cnr.CNRStorageWriter(path, quantization={"table": rule})
    state = {"table": table}
    return peak_mib(lambda: dcp.save(state, storage_writer=writer))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
