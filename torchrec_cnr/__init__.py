"""Incremental, quantized checkpoints of TorchRec models, through the stock ``torch.distributed.checkpoint``."""

from torchrec_cnr.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CNRError,
    ConfigurationError,
    DamagedError,
    LoadError,
    SaveError,
    StateMismatchError,
    StoreError,
    UntrackedRowsError,
    VersionError,
)
from torchrec_cnr.inference import InferenceTables
from torchrec_cnr.lineage import Checkpoint, latest, read_checkpoint
from torchrec_cnr.load_planner import CNRLoadPlanner
from torchrec_cnr.load_report import LoadReport
from torchrec_cnr.maintenance.annotations import tag, untag, write_metrics
from torchrec_cnr.maintenance.compaction import CompactionPlan, plan_compaction
from torchrec_cnr.maintenance.prune_plan import PrunePlan
from torchrec_cnr.maintenance.pruning import plan_prune
from torchrec_cnr.maintenance.retention import Best, Keep
from torchrec_cnr.maintenance.rewriting import compact
from torchrec_cnr.manager import CheckpointManager, Saved
from torchrec_cnr.planner import CNRSavePlanner
from torchrec_cnr.policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy
from torchrec_cnr.reader import CNRStorageReader
from torchrec_cnr.restoring import restore_newest
from torchrec_cnr.schemes import (
    AdaptiveAsymmetric,
    Asymmetric,
    ByErrorBudget,
    ByExpectedRestores,
    GreedySearch,
    HalfPrecision,
    KMeans,
    LeastSquares,
    NoQuantization,
    Quantization,
    Scheme,
    Symmetric,
    expected_restores,
)
from torchrec_cnr.table_reader import load_table
from torchrec_cnr.tracker import RowTracker
from torchrec_cnr.version import __version__
from torchrec_cnr.writer import CNRStorageWriter

__all__ = [
    "AdaptiveAsymmetric",
    "Asymmetric",
    "Best",
    "ByErrorBudget",
    "ByExpectedRestores",
    "CNRError",
    "CNRLoadPlanner",
    "CNRSavePlanner",
    "CNRStorageReader",
    "CNRStorageWriter",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "Compacted",
    "CompactionPlan",
    "ConfigurationError",
    "Consecutive",
    "DamagedError",
    "Full",
    "GreedySearch",
    "HalfPrecision",
    "InferenceTables",
    "Intermittent",
    "KMeans",
    "Keep",
    "LeastSquares",
    "LoadError",
    "LoadReport",
    "NoQuantization",
    "OneShot",
    "Policy",
    "PrunePlan",
    "Quantization",
    "RowTracker",
    "SaveError",
    "Saved",
    "Scheme",
    "StateMismatchError",
    "StoreError",
    "Symmetric",
    "UntrackedRowsError",
    "VersionError",
    "__version__",
    "compact",
    "expected_restores",
    "latest",
    "load_table",
    "plan_compaction",
    "plan_prune",
    "read_checkpoint",
    "restore_newest",
    "tag",
    "untag",
    "write_metrics",
]
