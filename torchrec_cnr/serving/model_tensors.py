"""Targets: the tensors of a model that an update writes to, matched to a checkpoint's as a load matches them.

Each process finds its own shards, without communication with the others.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.loading.fitting import Wanted, fit
from torchrec_cnr.loading.load_report import listed
from torchrec_cnr.loading.read_items import SameLayout, TargetTables
from torchrec_cnr.loading.torchrec_inference import quantized_tables
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.sharding import ShardKey, local_shards


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A shard of a tensor of a model.

    Attributes:
        fqn: FQN of the tensor.
        box: Box of the shard, in the tensor's indices.
        tensor: Values of the shard, of the box's size; for a quantized table, whole rows, uint8 [num_rows, row_bytes].
        row: Layout of a row of a quantized table; None for any other tensor.
    """

    fqn: str
    box: Box
    tensor: Tensor
    row: InferenceRow | None = None

    @property
    def key(self) -> ShardKey:
        """A key that identifies the shard, and is the same in every call of ``find_model_tensors``."""
        return self.fqn, self.box.offsets


def find_model_tensors(
    model: nn.Module, key: str | None, newest: Checkpoint, *, allow_partial: bool
) -> list[ModelTensor]:
    """Return the tensors of a model in this process that ``newest`` is applied to. For arguments see ``ServedModel``.

    Raises:
        StateMismatchError: A tensor is not in the checkpoint, or has another size or dtype.
        ConfigurationError: The model has quantized tables that cannot be loaded into.
    """
    state, planner, url = model.state_dict(), DefaultLoadPlanner(), newest.store.url
    planner.set_up_planner(state if key is None else {key: state}, is_coordinator=True)
    tensors = {fqn: value for fqn, value in planner.state_dict.items() if isinstance(value, Tensor)}
    tables = TargetTables(list(quantized_tables(model)))
    wanted = frozenset(Wanted.of(fqn, value, planner.mappings[fqn], tables) for fqn, value in tensors.items())
    fitted = fit(wanted, newest.manifest, url, allow_partial=True)
    if fitted.report.missing and not allow_partial:
        raise StateMismatchError(
            f"{url}: {len(fitted.report.missing)} tensors of the model are not in the checkpoint: "
            f"{listed(fitted.report.missing)}; pass the 'key' that its state dict was saved under, or "
            "allow_partial_load=True to keep their values"
        )
    targets: list[ModelTensor] = []
    for fqn, source in fitted.sources.items():
        if not isinstance(source.layout, SameLayout):
            raise StateMismatchError(
                f"{url}: {fqn!r} is optimizer state, which cannot be served; remove it from the model"
            )
        table = tables.find(tensors[fqn])
        if table is not None:
            targets += (ModelTensor(source.fqn, part.box, part.rows.detach(), part.row) for part in table.shards)
        else:
            shards = local_shards(tensors[fqn])
            targets += (ModelTensor(source.fqn, shard.box, shard.tensor.detach()) for shard in shards)
    return targets
