"""Measure the structure of the library: its modules, their imports and names, and what its operations pass through.

Run ``python -m tests.repository.structure``, with ``--root`` for another checkout. The operations use only
public names, so that checkouts of different layouts can be compared. The table's terms:

- A module is a ``.py`` file. An ``__init__.py`` is one only if it defines a function or a class.
- A unit is a module at the top level of the library, or a package there with all that is in it.
- The siblings in a folder are the ``.py`` files directly in it, except ``__init__.py``.
- Lines are counted as ``wc -l`` does. The lines of the library are those of all ``.py`` files.
- An import edge is a pair of files. An import statement anywhere in the first names the second, or a name in it. The
  packages that Python imports on the way, stubs, and imports by a string are not counted. An edge points up if the
  unit of the second file is in a later row of ``package_order`` than that of the first, and sideways if it is another
  unit of the same row.
- An import cycle is a set of files, each of which reaches all others by import edges.
- A public name is a class, function or type alias, defined at the top level of a file, that has no leading underscore.
- An operation passes through a module if any thread calls a Python function of the module meanwhile. Code that runs at
  import, compiled kernels and generated methods, such as a dataclass's ``__init__``, are not seen. Each operation runs
  twice and is counted the second time, when everything is imported and compiled: on a CPU, without a process group,
  with a model of one ``EmbeddingBag``. The delta is saved by the process that saved the baseline. The load is one
  ``dcp.load`` of a delta that is named. It and the compaction read what another process has saved, since a process
  keeps the manifests that it has parsed.
"""

import argparse
import ast
import functools
import importlib
import itertools
import multiprocessing
import sys
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tests.repository.package_order import RANK_OF

PACKAGE = "torchrec_cnr"
MIN_LINES = 60


class SourceFile:
    """A Python file within the library's own folder."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.num_lines = path.read_bytes().count(b"\n")
        self.body = ast.parse(path.read_text()).body
        self.is_init = path.name == "__init__.py"
        self.is_module = not self.is_init or any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in self.body)
        *self._package, stem = path.relative_to(folder).with_suffix("").parts
        self.unit = (self._package or [stem])[0]
        self.name = ".".join(self._package if self.is_init and self._package else [*self._package, stem])

    def imported_names(self) -> Iterator[str]:
        """Yield the absolute dotted names that are imported; ``from a import b`` gives ``a.b``."""
        for node in ast.walk(ast.Module(self.body, [])):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = [PACKAGE, *self._package][: len(self._package) + 2 - node.level] if node.level else []
                yield from (".".join([*origin, *filter(None, [node.module]), alias.name]) for alias in node.names)


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the classes, functions and type aliases that a statement defines, also under a condition."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
            yield name
        case ast.Assign([ast.Name(id=name)], ast.Name() | ast.Attribute() | ast.Subscript() | ast.BinOp()):
            if not name.isupper() and name[0].isupper():  # no constant, and no type variable
                yield name
        case ast.If() | ast.Try() | ast.ExceptHandler():
            for inner in ast.iter_child_nodes(node):
                yield from _defined(inner)


class Library:
    """The source of the library, by the names of its files."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file for file in (SourceFile(path, folder) for path in sorted(folder.rglob("*.py")))}

    @functools.cached_property
    def edges(self) -> dict[str, set[str]]:
        """The names of the files that each file imports."""
        edges: dict[str, set[str]] = {name: set() for name in self.files}
        for name, file in self.files.items():
            for package, *parts in (imported.split(".") for imported in file.imported_names()):
                if package == PACKAGE:
                    longest_first = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
                    edges[name].add(next(filter(self.files.__contains__, longest_first), "__init__"))
        return edges

    @property
    def unit_edges(self) -> Counter[tuple[str, str]]:
        """The number of import edges between each pair of different units, importer first."""
        units = ((self.files[a].unit, self.files[b].unit) for a, imported in self.edges.items() for b in imported)
        return Counter((importer, imported) for importer, imported in units if importer != imported)

    @property
    def cycles(self) -> set[frozenset[str]]:
        """The import cycles."""
        reached = {name: set(imported) for name, imported in self.edges.items()}
        for middle, start in itertools.product(reached, reached):
            if middle in reached[start]:
                reached[start] |= reached[middle]
        groups = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
        return groups - {frozenset()}

    @property
    def repeated_names(self) -> dict[str, list[str]]:
        """The public names that several files define, each with these files."""
        places = defaultdict(set)
        for file in self.files.values():
            for name in itertools.chain.from_iterable(map(_defined, file.body)):
                places[name].add(file.name)
        return {name: sorted(files) for name, files in sorted(places.items()) if len(files) > 1 and name[0] != "_"}

    def rows(self) -> Iterator[tuple[str, object]]:
        """Yield what the source shows, as rows of the table."""
        files, modules = self.files.values(), [file for file in self.files.values() if file.is_module]
        folders = Counter(file.path.parent for file in files if not file.is_init)
        widest, num_siblings = folders.most_common(1)[0]
        yield "modules", len(modules)
        yield "widest folder", f"{widest.name}, {num_siblings} siblings"
        yield f"modules below {MIN_LINES} lines", sum(file.num_lines < MIN_LINES for file in modules)
        yield "lines of the longest module", max(file.num_lines for file in modules)
        yield "lines of the library", sum(file.num_lines for file in files)
        yield "units", len({file.unit for file in files})
        yield "pairs of units with import edges", len(self.unit_edges)
        yield "import edges", sum(map(len, self.edges.values()))
        unknown = {file.unit for file in files} - set(RANK_OF)
        note = f"unknown: {len(unknown)} units have no place in the order" if unknown else ""
        steps = [RANK_OF.get(b, 0) - RANK_OF.get(a, 0) for a, b in self.unit_edges.elements()]
        yield "import edges that point up", note or sum(step > 0 for step in steps)
        yield "import edges that point sideways", note or sum(step == 0 for step in steps)
        yield "import cycles", len(self.cycles)
        yield "public names defined more than once", len(self.repeated_names)


class CallTrace:
    """Records the files of the library whose functions are called, in this thread and in all that start later."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"{folder}/"
        self._called, self._is_recording = set[str](), False
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_call = self._is_recording and event == "call" and code.co_name != "<module>"
        if is_call and code.co_filename.startswith(self._prefix):
            self._called.add(code.co_filename.removeprefix(self._prefix))

    def run(self, operation: Callable[[], object]) -> list[str]:
        """Run an operation; return the files whose functions it called."""
        self._called.clear()
        self._is_recording = True
        operation()
        self._is_recording = False
        return sorted(self._called)


class Job:
    """A model in training that saves into a folder."""

    def __init__(self, folder: Path) -> None:
        self.cnr: Any = importlib.import_module(PACKAGE)
        self.folder = folder
        torch.manual_seed(0)  # what a manifest needs of the format depends on the values
        self.model = nn.Sequential(nn.EmbeddingBag(1000, 16, sparse=True), nn.Linear(16, 1))
        self.tracker = self.cnr.RowTracker(self.model)
        self.state = {"model": self.model.state_dict(), "progress": {"step": 1}}
        self._planner = self.cnr.CNRSavePlanner(self.tracker, policy=self.cnr.Consecutive())
        self._writer = self.cnr.CNRStorageWriter(str(folder), quantization=self.cnr.AdaptiveAsymmetric(4))

    def train(self) -> None:
        """Modify some rows of the table."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model(torch.randint(1000, (8, 4))).mean().backward()
        optimizer.step()

    def save(self, name: str, function: Callable[..., Any] = save) -> None:
        """Save a checkpoint with one of DCP's functions, and wait until it is committed."""
        plug_ins = {"storage_writer": self._writer, "planner": self._planner}
        saving = function(self.state, checkpoint_id=str(self.folder / name), no_dist=True, **plug_ins)
        if function is async_save:
            saving.result()

    def close(self) -> None:
        """Stop tracking and saving."""
        self._writer.close()
        self.tracker.close()


def _save_chain(folder: Path, num_deltas: int) -> None:
    """Save a baseline and deltas, named by their numbers."""
    warnings.simplefilter("ignore")
    with closing(Job(folder)) as job:
        for number in range(1 + num_deltas):
            job.train()
            job.save(str(number))


def _save_chain_elsewhere(folder: Path, num_deltas: int) -> Path:
    """Have another process save a baseline and deltas; return the last."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(_save_chain, (folder, num_deltas))
    return folder / str(num_deltas)


def trace_save(trace: CallTrace, folder: Path, function: Callable[..., Any] = save) -> list[str]:
    """Save a delta."""
    with closing(Job(folder)) as job:
        job.train()
        job.save("0")
        job.train()
        files = trace.run(lambda: job.save("1", function))
    if (kind := job.cnr.read_checkpoint(str(folder / "1")).kind) != "delta":
        raise RuntimeError(f"the traced save wrote a {kind}, expected a delta")
    return files


def trace_load(trace: CallTrace, folder: Path) -> list[str]:
    """Load a delta and the baseline that it is based on."""
    path = str(_save_chain_elsewhere(folder, 1))
    with closing(Job(folder)) as job:
        plug_ins = {"storage_reader": job.cnr.CNRStorageReader(path), "planner": job.cnr.CNRLoadPlanner(job.tracker)}
        return trace.run(lambda: load(job.state, no_dist=True, **plug_ins))


def trace_compaction(trace: CallTrace, folder: Path) -> list[str]:
    """Compact two deltas with the baseline that they are based on."""
    path = _save_chain_elsewhere(folder, 2)
    num_files = len(list(path.iterdir()))
    files = trace.run(functools.partial(importlib.import_module(PACKAGE).compact, str(path)))
    if len(list(path.iterdir())) == num_files:
        raise RuntimeError(f"the traced compaction of {path} wrote no file")
    return files


def trace_operations(folder: Path) -> dict[str, list[str]]:
    """Return the files that each operation passes through, within the library's own folder."""
    trace, paths = CallTrace(folder), {}
    operations: Mapping[str, Callable[[CallTrace, Path], list[str]]] = {
        "a delta save": trace_save,
        "an asynchronous delta save": functools.partial(trace_save, function=async_save),
        "a load": trace_load,
        "a compaction": trace_compaction,
    }
    for name, operation in operations.items():
        for _ in range(2):  # the first imports and compiles
            with tempfile.TemporaryDirectory() as temporary:
                paths[name] = operation(trace, Path(temporary))
    return paths


def main() -> None:
    """Print the table, and the lists that are asked for."""
    parser = argparse.ArgumentParser(description="Measure the structure of the library.")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout; by default the present directory")
    parser.add_argument("--names", action="store_true", help="list the public names that are defined more than once")
    parser.add_argument("--paths", action="store_true", help="list the modules that each operation passes through")
    arguments = parser.parse_args()
    folder = arguments.root.resolve() / PACKAGE
    sys.path.insert(0, str(folder.parent))
    if (origin := importlib.import_module(PACKAGE).__file__) != str(folder / "__init__.py"):
        parser.error(f"{PACKAGE} was imported from {origin}, expected {folder}; name a checkout with --root")
    warnings.simplefilter("ignore")  # DCP warns that there is no process group
    library, paths = Library(folder), trace_operations(folder)
    table = [*library.rows(), *((f"modules that {name} passes through", len(files)) for name, files in paths.items())]
    lines = ["| measure | value |", "|---|---|", *(f"| {measure} | {value} |" for measure, value in table)]
    lists = {"Public names defined more than once": library.repeated_names} if arguments.names else {}
    lists |= {"Modules that an operation passes through": paths} if arguments.paths else {}
    for title, items in lists.items():
        lines += ["", f"{title}:", *(f"- {name} ({len(files)}): {', '.join(files)}" for name, files in items.items())]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
