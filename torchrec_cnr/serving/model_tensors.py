"""Targets: the tensors of a model that a checkpoint's go to, fitted to it as a load fits them.

Each process finds those that it holds, its own shards, without a word to the others.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.loading.fitting import Wanted, fit, listed
from torchrec_cnr.loading.read_items import SameLayout, TargetTables
from torchrec_cnr.loading.torchrec_inference import quantized_tables
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.sharding import ShardKey, local_shards


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A shard of a tensor of a model.

    Attributes:
        fqn: The tensor.
        box: Of the shard, in the tensor's indices.
        tensor: Its memory, of the box's size; of a quantized table uint8 [num_rows, row_bytes], whole rows.
        row: How a quantized table keeps a row.
    """

    fqn: str
    box: Box
    tensor: Tensor
    row: InferenceRow | None = None

    @property
    def key(self) -> ShardKey:
        """Tells it from others, also when they are found anew."""
        return self.fqn, self.box.offsets


def find_model_tensors(
    model: nn.Module, key: str | None, newest: Checkpoint, *, allow_partial: bool
) -> list[ModelTensor]:
    """What this process holds of a model that ``newest`` is to be applied to; for other arguments see ``ServedModel``.

    Raises:
        StateMismatchError: A tensor is not in the checkpoint, or of another size or dtype.
        ConfigurationError: The model has quantized tables that nothing can be loaded into.
    """
    state, planner, url = model.state_dict(), DefaultLoadPlanner(), newest.store.url
    planner.set_up_planner(state if key is None else {key: state}, is_coordinator=True)
    tensors = {fqn: value for fqn, value in planner.state_dict.items() if isinstance(value, Tensor)}
    tables = TargetTables(list(quantized_tables(model)))
    wanted = frozenset(Wanted.of(fqn, value, planner.mappings[fqn], tables) for fqn, value in tensors.items())
    fitted = fit(wanted, newest.manifest, url, allow_partial=True)
    if fitted.report.missing and not allow_partial:
        raise StateMismatchError(
            f"{url}: {len(fitted.report.missing)} of the model not in the checkpoint: {listed(fitted.report.missing)}; "
            "pass the 'key' that its state dict was saved under, or allow_partial_load=True to leave these as they are"
        )
    targets: list[ModelTensor] = []
    for fqn, source in fitted.sources.items():
        if not isinstance(source.layout, SameLayout):
            raise StateMismatchError(
                f"{url}: {fqn!r} is optimizer state, which is not served; leave it out of the model"
            )
        table = tables.find(tensors[fqn])
        if table is not None:
            targets.append(ModelTensor(source.fqn, Box.whole(table.size), table.rows.detach(), table.row))
        else:
            shards = local_shards(tensors[fqn])
            targets += (ModelTensor(source.fqn, shard.box, shard.tensor.detach()) for shard in shards)
    return targets
