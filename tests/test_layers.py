"""The architecture, read from the source: imports point down, and modules and functions stay small."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "torchrec_cnr"
FOLDER = Path(__file__).parents[1] / PACKAGE
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60

# A unit is a module of the package, or a folder of modules.
LAYERS = (
    {"errors", "version", "quantities", "progress", "phases", "pace", "collector"},
    {
        "kernels",
        "frames",
        "rows",
        "boxes",
        "tails",
        "schemes",
        "manifest",
        "coverage",
        "renumbering",
        "manifest_json",
        "manifest_parser",
        "earlier_versions",
        "regions",
        "digests",
        "fitting",
        "optimizer_state",
        "pickles",
        "ranked",
        "inference_rows",
        "inference_regions",
    },
    {"shards", "policies"},
    {
        "modified",
        "tracked",
        "untracked",
        "packs",
        "pack_reader",
        "stores",
        "streams",
        "local_files",
        "obstore_s3",
        "remote_files",
        "fences",
        "leases",
        "lineage",
        "store_urls",
        "row_logs",
        "row_blocks",
        "marking",
        "kafka",
        "newest",
        "decisions",
        "handover",
        "choosing",
        "encoding",
        "fold_plan",
        "checkpoint_rows",
        "folding",
        "objects",
        "staged_codes",
        "flight",
        "table_reader",
    },
    {
        "planner",
        "load_planner",
        "writer",
        "reader",
        "assembly",
        "rank_writer",
        "block_writing",
        "read_items",
        "inference_tables",
        "item_regions",
        "agreement",
        "staging",
        "cuts",
    },
    {
        "stepped",
        "tracker",
        "inference",
        "maintenance",
        "manager",
        "due",
        "restoring",
        "reader_state",
        "pulse",
        "testing",
        "serving",
    },
    {"__init__", "cli"},
)
LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}
ALOOF = {"planner", "load_planner", "writer", "reader"}  # DCP's plug-ins do not import one another

# The units that may import these packages.
FOREIGN = {
    "torchrec": {"tracker", "inference", "serving"},
    "jinja2": {"cli"},
    "matplotlib": {"cli"},
    "fbgemm_gpu": {"tracker", "inference"},
    "torch.distributed._shard": {"shards"},
    "torch.distributed.tensor": {"shards"},
    "torch.distributed": set(LAYER_OF) - LAYERS[0] - LAYERS[1],
    "rich": {"cli"},
    "typer": {"cli"},
    "confluent_kafka": {"kafka"},
    "tenacity": {"remote_files"},
    "obstore": {"obstore_s3"},
    "boto3": {"obstore_s3"},
    "fsspec": set(LAYER_OF) - LAYERS[0] - LAYERS[1] - LAYERS[2],
}


@dataclass(frozen=True)
class Module:
    """A module of the package, parsed.

    Attributes:
        name: Its dotted name within the package; a folder's own name stands for its ``__init__``.
    """

    name: str
    path: Path

    @property
    def unit(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def imports(self) -> frozenset[str]:
        """Absolute dotted names that this module imports; ``from a import b`` gives ``a.b``."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.update(f"{self._origin(node)}.{alias.name}" for alias in node.names)
        return frozenset(names)

    def _origin(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that ``node`` imports from."""
        if not node.level:
            return node.module or ""
        package = [PACKAGE, *self.path.relative_to(FOLDER).parent.parts]
        return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _read_package() -> Iterator[Module]:
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        yield Module(".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts), path)


MODULES = {module.name: module for module in _read_package()}
every_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


def _targets(module: Module) -> set[str]:
    """Names of the modules of the package that ``module`` imports."""
    targets = set()
    for name in module.imports:
        head, _, rest = name.partition(".")
        if head != PACKAGE:
            continue
        parts = rest.split(".")
        found = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        targets.add(next((target for target in found if target in MODULES), "__init__"))
    return targets


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_package_is_read() -> None:
    """The tests below see the package; no module, no proof."""
    assert "errors" in MODULES
    assert any(_targets(module) for module in MODULES.values())


def test_every_module_has_one_layer() -> None:
    """The table of layers holds every module of the package, and none twice."""
    missing = {module.unit for module in MODULES.values()} - set(LAYER_OF)
    assert not missing, f"modules without a layer: add {sorted(missing)} to LAYERS, each as low as it can be"
    assert len(LAYER_OF) == sum(map(len, LAYERS))


@every_module
def test_imports_point_down(module: Module) -> None:
    """A module imports from its own layer and those below, a plug-in of DCP from those below only."""
    targets = [MODULES[name].unit for name in sorted(_targets(module))]
    above = [unit for layer in LAYERS[LAYER_OF.get(module.unit, 0) + 1 :] for unit in layer]
    assert [unit for unit in targets if unit in above] == []
    if module.unit in ALOOF:
        assert [unit for unit in targets if unit in ALOOF - {module.unit}] == []


def test_imports_make_no_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    graph = {name: _targets(module) for name, module in MODULES.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import one another in a cycle: {' <- '.join(error.args[1])}")
    assert set(order) == set(MODULES)


@every_module
def test_foreign_packages_stay_in_their_place(module: Module) -> None:
    """TorchRec, fbgemm, DCP, sharded tensors and storage are known only where the table says so."""
    strangers = {
        name
        for name in module.imports
        for package, units in FOREIGN.items()
        if _is_within(name, package) and module.unit not in units
    }
    assert sorted(strangers) == []


@every_module
def test_imports_stand_at_the_top(module: Module) -> None:
    """No import hides in a function or class, where it would also hide a cycle."""
    hidden = {
        f"line {inner.lineno}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    assert sorted(hidden) == []


@every_module
def test_sizes_stay_small(module: Module) -> None:
    """A module and a function can each be read in one go."""
    num_lines = len(module.path.read_text().splitlines())
    assert num_lines <= MAX_MODULE_LINES
    long = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: num_lines for name, num_lines in long.items() if num_lines > MAX_FUNCTION_LINES} == {}


@every_module
def test_environment_is_not_read(module: Module) -> None:
    """Settings are arguments, not environment variables."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert sorted((attributes | module.imports) & {f"os.{name}" for name in names}) == []
