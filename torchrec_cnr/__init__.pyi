from .errors import (
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
from .inference import InferenceTables
from .lineage import Checkpoint, latest, read_checkpoint
from .load_planner import CNRLoadPlanner
from .load_report import LoadReport
from .planner import CNRSavePlanner
from .policies import Consecutive, Full, Intermittent, OneShot, Policy
from .reader import CNRStorageReader
from .schemes import (
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
from .table_reader import load_table
from .tracker import RowTracker
from .version import __version__
from .writer import CNRStorageWriter

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
    "expected_restores",
    "latest",
    "load_table",
    "read_checkpoint",
]
