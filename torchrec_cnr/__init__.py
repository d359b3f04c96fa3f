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
from torchrec_cnr.maintenance.compaction import CompactionPlan, plan_compaction
from torchrec_cnr.maintenance.rewriting import compact
from torchrec_cnr.planner import CNRSavePlanner
from torchrec_cnr.policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy
from torchrec_cnr.reader import CNRStorageReader
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
    "ByErrorBudget",
    "ByExpectedRestores",
    "CNRError",
    "CNRLoadPlanner",
    "CNRSavePlanner",
    "CNRStorageReader",
    "CNRStorageWriter",
    "Checkpoint",
    "CheckpointExistsError",
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
    "LeastSquares",
    "LoadError",
    "LoadReport",
    "NoQuantization",
    "OneShot",
    "Policy",
    "Quantization",
    "RowTracker",
    "SaveError",
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
    "read_checkpoint",
]
