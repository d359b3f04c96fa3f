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
from .kafka import KafkaRows
from .lineage.checkpoint import Checkpoint, read_checkpoint
from .lineage.journal import Prune, PrunedCheckpoint
from .lineage.latest import latest
from .loading.load_report import LoadReport
from .loading.planner import CNRLoadPlanner
from .loading.reader import CNRStorageReader
from .loading.torchrec_inference import InferenceTables
from .maintenance.catalog import list_checkpoints, read_journal
from .maintenance.compaction.compact import compact
from .maintenance.compaction.plan import CompactionPlan, plan_compaction
from .maintenance.comparison.compare import Comparison, compare
from .maintenance.dcp_import.import_checkpoint import import_checkpoint
from .maintenance.execute import execute
from .maintenance.export.export import Export, export
from .maintenance.pruning.execute import PruneResult
from .maintenance.pruning.plan import PrunePlan, plan_prune
from .maintenance.pruning.retention import Best, Keep
from .maintenance.tags_and_metrics import tag, untag, write_metrics
from .maintenance.verification.verify import VerifyReport, verify
from .manager.background import Background
from .manager.local_checkpoints import LocalCheckpoints
from .manager.manager import CheckpointManager
from .manager.param_groups import ParamGroups
from .manager.preemption import Preemption
from .manager.random_state import RandomState
from .manager.reader_state import ReaderState
from .manager.restore import restore_newest
from .policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy
from .progress import Saved
from .quantization import (
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
    TransformCoded,
    expected_restores,
)
from .reading.load_table import load_table
from .saving.planner import CNRSavePlanner
from .saving.writer import CNRStorageWriter
from .serving import Applied, Commit, Commits, Lag, RootCommits, RowSubscriber
from .storage.local_copies import LocalCopies
from .tracking.row_tracker import RowTracker
from .version import __version__

__all__ = [
    "AdaptiveAsymmetric",
    "Applied",
    "Asymmetric",
    "Background",
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
    "Comparison",
    "ConfigurationError",
    "Consecutive",
    "DamagedError",
    "Export",
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
    "LocalCheckpoints",
    "LocalCopies",
    "NoQuantization",
    "OneShot",
    "ParamGroups",
    "Policy",
    "Preemption",
    "Prune",
    "PrunePlan",
    "PruneResult",
    "PrunedCheckpoint",
    "Quantization",
    "RandomState",
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
    "TransformCoded",
    "UntrackedRowsError",
    "VerifyReport",
    "VersionError",
    "__version__",
    "compact",
    "compare",
    "execute",
    "expected_restores",
    "export",
    "import_checkpoint",
    "latest",
    "list_checkpoints",
    "load_table",
    "plan_compaction",
    "plan_prune",
    "read_checkpoint",
    "read_journal",
    "restore_newest",
    "tag",
    "untag",
    "verify",
    "write_metrics",
]
