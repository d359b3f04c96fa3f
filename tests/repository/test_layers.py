"""The architecture, read from the source: imports point down, and modules and functions stay small."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import torchrec_cnr
from tests.repository.package_order import ORDER, RANK_OF

PACKAGE = "torchrec_cnr"
FOLDER = Path(torchrec_cnr.__file__).parent
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_SIBLINGS = 16

# The packages and modules that may import these libraries.
FOREIGN = {
    "torchrec": {"tracking", "loading.torchrec_inference", "serving.forward_lock"},
    "fbgemm_gpu": {"tracking", "loading.torchrec_inference"},
    "jinja2": {"cli"},
    "matplotlib": {"cli"},
    "rich": {"cli"},
    "typer": {"cli"},
    "confluent_kafka": {"kafka"},
    "obstore": {"storage.obstore_s3"},
    "boto3": {"storage.obstore_s3"},
    "torch.distributed._shard": {"sharding"},
    "torch.distributed.tensor": {"sharding"},
    "torch.distributed": {unit for units in ORDER[5:] for unit in units} - {"storage"},
    "fsspec": {unit for units in ORDER[6:] for unit in units},
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
FOLDERS = sorted({module.path.parent for module in MODULES.values()})
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


def test_every_package_has_its_place() -> None:
    """The order names every package and every module at the top, and none twice."""
    units = {module.unit for module in MODULES.values()}
    assert units == set(RANK_OF), "put a new package into ORDER, as low as it can be"
    assert len(RANK_OF) == sum(map(len, ORDER))


@every_module
def test_imports_point_down(module: Module) -> None:
    """A module imports from its own package and from packages below it."""
    units = {MODULES[name].unit for name in _targets(module)} - {module.unit}
    assert {unit for unit in units if RANK_OF[unit] >= RANK_OF[module.unit]} == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(FOLDER.parent)))
def test_folders_stay_narrow(folder: Path) -> None:
    """A folder holds at most 16 modules and 16 packages, so that one look takes it in."""
    modules = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= MAX_SIBLINGS
    assert len(list(folder.glob("*/__init__.py"))) <= MAX_SIBLINGS


def test_imports_make_no_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    graph = {name: _targets(module) for name, module in MODULES.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import one another in a cycle: {' <- '.join(error.args[1])}")
    assert set(order) == set(MODULES)


@every_module
def test_foreign_libraries_stay_in_their_place(module: Module) -> None:
    """TorchRec, FBGEMM, DCP, sharded tensors and storage are known only where the table says so."""
    strangers = {
        name
        for name in module.imports
        for library, places in FOREIGN.items()
        if _is_within(name, library) and not any(_is_within(module.name, place) for place in places)
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
