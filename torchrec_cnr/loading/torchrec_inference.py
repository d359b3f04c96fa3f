"""The tables of quantized TorchRec modules, so that checkpoints can be loaded into them.

TorchRec's quantized collections look rows up in FBGEMM's inference kernels, and put views of the kernels' memory into
state dicts, as uint8. The kernels define the format of that memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.tbe.cache.kv_embedding_ops_inference import KVEmbeddingInference
from torch import nn
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box, fills
from torchrec_cnr.kernels.search_plan import SCALE_AND_BIAS_BYTES
from torchrec_cnr.loading.read_items import InferenceShard, InferenceTable, TargetTables
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow

_BITS = {SparseType.INT2: 2, SparseType.INT4: 4, SparseType.INT8: 8, SparseType.FP16: 16, SparseType.FP32: 32}
_WHOLE, _SCALE_AND_BIAS_APART = 0, 2  # values of split_scale_bias_mode: how a kernel splits a table into views


class InferenceTables(TargetTables):
    """All quantized tables of a model, as targets for ``CNRLoadPlanner(inference=...)``.

    Finds TorchRec's quantized ``EmbeddingBagCollection`` and ``EmbeddingCollection`` with tables of INT8, INT4, INT2,
    FP16 or FP32, on CPUs, and those that TorchRec has sharded. Tables are matched by storage, so pass the model's live
    state dict to ``dcp.load``.

    Args:
        model: The quantized model (see ``torchrec.inference.modules.quantize_embeddings``).

    Raises:
        ConfigurationError: The model has no quantized table, or one that cannot be loaded: it is not on the CPU, of
            another data type, its rows are not in memory, or its shards are not those of its floats.

    Examples:
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from torchrec.inference.modules import quantize_embeddings
        >>> table = EmbeddingBagConfig(name="users", embedding_dim=16, num_embeddings=1_000, feature_names=["user"])
        >>> trained = torch.nn.Sequential(EmbeddingBagCollection([table]))
        >>> serving = quantize_embeddings(trained, torch.qint8, inplace=False)
        >>> planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(serving), allow_partial_load=True)
        >>> rows = {"model.users.weight": serving.state_dict()["0.embedding_bags.users.weight"]}
        >>> dcp.load(rows, storage_reader=cnr.CNRStorageReader("run/step-2"), planner=planner)
        >>> planner.report.loaded
        ('model.users.weight',)
    """

    def __init__(self, model: nn.Module) -> None:
        tables = list(quantized_tables(model))
        if not tables:
            raise ConfigurationError(
                f"{type(model).__name__} has no quantized table; quantize it first, with "
                "torchrec.inference.modules.quantize_embeddings"
            )
        super().__init__(tables)


def quantized_tables(model: nn.Module) -> Iterator[InferenceTable]:
    """Yield the tables of a model's quantized modules, in the order of its modules.

    Raises:
        ConfigurationError: The tables of a module cannot be loaded.
    """
    for path, module in model.named_modules():
        path = path or type(module).__name__
        if isinstance(module, ShardedQuantEmbeddingBagCollection | ShardedQuantEmbeddingCollection):
            yield from _sharded_tables(path, module.tbes_configs())
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for kernel in module._emb_modules:
                for shard in _shards_of_kernel(path, kernel):
                    yield InferenceTable((shard.box.num_rows, shard.box.num_cols), (shard,))


def _sharded_tables(path: str, kernels: Mapping[Any, Any]) -> Iterator[InferenceTable]:
    """Yield the tables of a sharded module, given its kernels and the configurations of their tables."""
    sizes: dict[str, tuple[int, int]] = {}
    shards: dict[str, list[InferenceShard]] = {}
    for kernel, config in kernels.items():
        tables = config.embedding_tables
        offsets = [table.local_metadata.shard_offsets if table.local_metadata else (0, 0) for table in tables]
        for table, shard in zip(tables, _shards_of_kernel(path, kernel, offsets), strict=True):
            sizes[table.name] = table.num_embeddings, table.embedding_dim
            shards.setdefault(table.name, []).append(shard)
    for name, size in sizes.items():
        boxes = [shard.box for shard in shards[name]]
        if not fills(size, boxes):
            raise ConfigurationError(
                f"{path}: the shards of table {name!r} do not fill its {size[0]:,} × {size[1]:,} values: got {boxes}; "
                "before you quantize the model, call TorchRec's "
                "quant_prep_enable_quant_state_dict_split_scale_bias_for_types, so that it is sharded by its columns "
                "alone, without scales and biases"
            )
        yield InferenceTable(size, tuple(shards[name]))


def _shards_of_kernel(
    path: str, kernel: Any, offsets: Sequence[Sequence[int]] | None = None
) -> Iterator[InferenceShard]:
    """Yield a kernel's shards, whose first rows and columns in their tables are ``offsets``, by default (0, 0)."""
    if isinstance(kernel, KVEmbeddingInference):
        raise ConfigurationError(f"{path} has virtual tables, whose rows are not in memory; leave its module out")
    if kernel.reverse_qparam or kernel.scale_bias_size_in_bytes != SCALE_AND_BIAS_BYTES:
        raise ConfigurationError(f"{path}: expected fp16 scale and bias in front of each row, as kernels on CPUs have")
    views = (kernel.split_embedding_weights_with_scale_bias(mode) for mode in (_WHOLE, _SCALE_AND_BIAS_APART))
    offsets = offsets or [(0, 0)] * len(kernel.embedding_specs)
    for spec, origin, (rows, *_), (codes, *_) in zip(kernel.embedding_specs, offsets, *views, strict=True):
        name, _, num_cols, data_type, _ = spec
        if data_type not in _BITS:
            raise ConfigurationError(
                f"{path}: table {name!r} is {data_type}; only INT8, INT4, INT2, FP16 and FP32 can be loaded"
            )
        if rows.device.type != "cpu":
            raise ConfigurationError(
                f"{path}: table {name!r} is on {rows.device}; only tables on the CPU can be loaded"
            )
        box = Box((origin[0], origin[1]), (len(rows), num_cols))
        yield InferenceShard(box, rows, InferenceRow(num_cols, _BITS[data_type], rows.shape[1]), (rows, codes))
