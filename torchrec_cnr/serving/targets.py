"""Targets: the tensors of a model that a checkpoint's go to, found as a load finds them.

Each process finds those that it holds, its own shards, without a word to the others.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.fitting import QUANTIZED, Wanted, fit
from torchrec_cnr.inference import quantized_tables
from torchrec_cnr.inference_tables import TargetTables
from torchrec_cnr.item_regions import load_metadata
from torchrec_cnr.lineage import Lineage
from torchrec_cnr.load_report import listed
from torchrec_cnr.read_items import read_items, wanted_item


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor of a model.

    Attributes:
        item: What is to be read for it.
        tensor: Its memory; of a quantized table uint8 [num_rows, row_bytes], whole rows.
    """

    item: ReadItem
    tensor: Tensor

    @property
    def fqn(self) -> str:
        """Its name in checkpoints."""
        return str(self.item.storage_index.fqn)


def find_targets(model: nn.Module, key: str | None, lineage: Lineage, *, allow_partial: bool) -> list[Target]:
    """What of a model this process holds.

    Args:
        model: The model.
        key: What its state dict was saved under; None if it was saved as it is.
        lineage: What is to be applied.
        allow_partial: Whether a tensor that checkpoints do not have is left as it is, unless it is a quantized table.

    Raises:
        StateMismatchError: A tensor is not in the checkpoint, or of another size or dtype.
        ConfigurationError: The model has quantized tables that nothing can be loaded into.
    """
    newest, metadata = lineage.newest, load_metadata(lineage)
    state = model.state_dict()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state if key is None else {key: state}, metadata, is_coordinator=True)
    tensors = {fqn: value for fqn, value in planner.state_dict.items() if isinstance(value, Tensor)}
    tables = TargetTables(list(quantized_tables(model)))
    wanted = frozenset(_wanted(fqn, value, planner, tables) for fqn, value in tensors.items())
    found = fit(wanted, newest.manifest, newest.store.url, allow_partial=True)
    if found.report.missing and not allow_partial:
        raise StateMismatchError(
            f"{newest.store.url}: {listed(list(found.report.missing))} of the model not in the checkpoint; pass the "
            "'key' that its state dict was saved under, or allow_partial_load=True to leave these as they are"
        )
    targets: list[Target] = []
    for fqn, source in found.sources.items():
        table = tables.find(tensors[fqn])
        if table is not None:
            targets.append(Target(table.read_item(fqn, source.fqn), table.rows.detach()))
        else:
            items = read_items(fqn, source, tensors, metadata, newest.manifest)
            targets += (Target(item, planner.resolve_tensor(item).detach()) for item in items)
    return targets


def _wanted(fqn: str, value: Any, planner: DefaultLoadPlanner, tables: TargetTables) -> Wanted:
    table, item = tables.find(value), wanted_item(fqn, value, planner.mappings[fqn])
    return item if table is None else replace(item, size=table.size, dtype=QUANTIZED)
