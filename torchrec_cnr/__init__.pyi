from .errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CNRError,
    ConfigurationError,
    DamagedError,
    FencedError,
    LoadError,
    SaveError,
    StateMismatchError,
    StoreError,
    UntrackedRowsError,
    VersionError,
)
from .fitting import LoadReport
from .inference import InferenceTables
from .kafka import KafkaRows
from .lineage import Checkpoint, read_checkpoint
from .load_planner import CNRLoadPlanner
from .maintenance.annotations import tag, untag, write_metrics
from .maintenance.compaction import CompactionPlan, plan_compaction
from .maintenance.execution import execute
from .maintenance.prune_execution import PruneResult
from .maintenance.pruning import PrunePlan, plan_prune
from .maintenance.replacing import compact
from .maintenance.retention import Best, Keep
from .manager import CheckpointManager
from .newest import latest
from .planner import CNRSavePlanner
from .policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy
from .progress import Saved
from .reader import CNRStorageReader
from .reader_state import ReaderState
from .restoring import restore_newest
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
from .serving import Applied, Commit, Commits, Lag, RootCommits, RowSubscriber
from .table_reader import load_table
from .tracker import RowTracker
from .version import __version__
from .writer import CNRStorageWriter

__all__ = [
    "AdaptiveAsymmetric",
    "Applied",
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
    "Commit",
    "Commits",
    "Compacted",
    "CompactionPlan",
    "ConfigurationError",
    "Consecutive",
    "DamagedError",
    "FencedError",
    "Full",
    "GreedySearch",
    "HalfPrecision",
    "InferenceTables",
    "Intermittent",
    "KMeans",
    "KafkaRows",
    "Keep",
    "Lag",
    "LeastSquares",
    "LoadError",
    "LoadReport",
    "NoQuantization",
    "OneShot",
    "Policy",
    "PrunePlan",
    "PruneResult",
    "Quantization",
    "ReaderState",
    "RootCommits",
    "RowSubscriber",
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
    "execute",
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
