"""Warm starts: fit a checkpoint to another model, by rules for names, sizes, and for what is loaded at all.

The rules are patterns of the state dict's FQNs. They are resolved once, against all names on both sides. What would
have to be guessed is an error: a rule that matches nothing, two rules for one name, or two names for one saved tensor.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torchrec_cnr.arguments import check_patterns, check_type
from torchrec_cnr.errors import ConfigurationError, StateMismatchError
from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.loading.fitting import Fit, Resize, Wanted, fit
from torchrec_cnr.loading.id_maps import carried_ids
from torchrec_cnr.loading.load_report import listed
from torchrec_cnr.loading.optimizer_state import StateName, is_count, weight_of
from torchrec_cnr.loading.row_maps import RowMap

_UNUSED = "  {} {!r}: nothing that is loaded has such a name"


@dataclass(frozen=True)
class WarmStart:
    """The rules of a warm start; without any, a load is that of the same model.

    Attributes:
        rename: Pairs of a pattern of FQNs in the state dict, and the saved FQN. Each ``*`` of the pattern stands for
            any text, and the ``*`` of the saved FQN, as many of them, stand for the same texts.
        resize: Patterns of tensors that may have other rows than the saved ones, and their row maps. Without a map, the
            rows that both have are loaded.
        only: Patterns of what is loaded; None for everything.
    """

    rename: tuple[tuple[str, str], ...] = ()
    resize: tuple[tuple[str, RowMap | None], ...] = ()
    only: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        rename: Mapping[str, str] | None,
        resize: tuple[tuple[str, RowMap | None], ...],
        only: Sequence[str] | None,
    ) -> "WarmStart":
        """Return the rules of a planner's arguments, of which ``resize`` was checked.

        Raises:
            ConfigurationError: An argument is invalid.
        """
        check_type("rename", rename, (Mapping, type(None)), "a mapping of patterns to saved FQNs")
        check_patterns("only", only)
        for pattern, saved in (rename or {}).items():
            for text in (pattern, saved):
                check_type("rename", text, str, "a mapping of patterns to saved FQNs")
            if pattern.count("*") != saved.count("*"):
                raise ConfigurationError(f"'rename' needs as many '*' in {saved!r} as in {pattern!r}")
        pairs = tuple(sorted((rename or {}).items()))
        return cls(pairs, resize, None if only is None else tuple(sorted(only)))

    def __bool__(self) -> bool:
        return self != WarmStart()

    def fit(
        self,
        wanted: Collection[Wanted],
        manifest: Manifest,
        url: str,
        *,
        allow_partial: bool,
        ranked: Mapping[str, tuple[str, ...]],
    ) -> Fit:
        """Decide what a load does, as :func:`fitting.fit` does, after these rules.

        Args:
            wanted, manifest, url, allow_partial: As of :func:`fitting.fit`.
            ranked: The names in ``wanted`` of objects that another number of ranks saved, by FQN in the state dicts.

        Raises:
            StateMismatchError: A rule or something else does not fit; the message names all of it.
        """
        if not self:
            return fit(wanted, manifest, url, allow_partial=allow_partial)
        fqns = sorted({item.fqn for item in wanted})
        of_ranks = {name for names in ranked.values() for name in names}
        loaded = [fqn for fqn in fqns if fqn in of_ranks or self.loads(fqn)]
        saved_fqns, problems = self._renamed(loaded, manifest)
        problems += _moved_state({item.fqn: item for item in wanted}, loaded, saved_fqns, manifest)
        row_maps, of_maps = self._row_maps(loaded)
        problems += [*of_maps, *self._unused([*fqns, *ranked], [*loaded, *ranked])]
        named = [
            _named(item, saved_fqns, manifest)
            for item in wanted
            if item.fqn in saved_fqns or item.fqn not in saved_fqns.values()
        ]
        unloaded = set(fqns) - set(loaded) - set(saved_fqns.values())
        by_saved_fqn = {saved_fqns.get(fqn, fqn): row_map for fqn, row_map in row_maps.items()}
        resize, kept, of_ids = _resize(named, by_saved_fqn, unloaded, manifest)
        problems += of_ids
        if problems:
            raise StateMismatchError("\n".join([f"the warm start does not fit {url}:", *problems]))
        try:
            fitted = fit(
                named,
                manifest,
                url,
                allow_partial=allow_partial,
                resize=resize,
                skipped=unloaded | kept,
                ignores_unexpected=self.only is not None,
            )
        except StateMismatchError as error:
            raise StateMismatchError(_with_own_names(str(error), saved_fqns)) from None
        skipped = sorted(fqn for fqn in fqns if fqn not in loaded or saved_fqns.get(fqn, fqn) in kept)
        return _named_back(fitted, {saved: fqn for fqn, saved in saved_fqns.items()}, skipped)

    def loads(self, fqn: str) -> bool:
        """Return whether an item of the state dict is loaded, if the checkpoint has it."""
        return self.only is None or _matches(fqn, self.only)

    def renames(self, fqn: str) -> bool:
        """Return whether a rule renames an item of the state dict."""
        return any(_match(pattern, fqn) is not None for pattern, _ in self.rename)

    def _renamed(self, fqns: Sequence[str], manifest: Manifest) -> tuple[dict[str, str], list[str]]:
        """Return the saved FQNs of what is renamed, and what is wrong with the rules."""
        saved_fqns: dict[str, str] = {}
        rules: dict[str, list[str]] = defaultdict(list)
        for pattern, saved_pattern in self.rename:
            for fqn in fqns:
                if (match := _match(pattern, fqn)) is not None:
                    texts = iter(match.groups())
                    saved_fqns[fqn] = re.sub(r"\*", lambda _: next(texts), saved_pattern)  # noqa: B023 - used at once
                    rules[fqn].append(pattern)
        problems = [f"  {fqn!r} is renamed by {' and by '.join(map(repr, of))}" for fqn, of in rules.items() if of[1:]]
        is_there = {*manifest.tensors, *manifest.objects}
        absent = sorted({saved for saved in saved_fqns.values() if saved not in is_there})
        if absent:
            problems.append(f"  {len(absent)} renamed, but not in the checkpoint: {listed([*map(repr, absent)])}")
        claims: dict[str, list[str]] = defaultdict(list)
        for fqn in fqns:
            claims[saved_fqns.get(fqn, fqn)].append(fqn)
        problems += [
            f"  {' and '.join(map(repr, claimed))} would both be loaded from {saved!r}"
            for saved, claimed in claims.items()
            if claimed[1:]
        ]
        used = {pattern for patterns in rules.values() for pattern in patterns}
        problems += [_UNUSED.format("rename", pattern) for pattern, _ in self.rename if pattern not in used]
        return saved_fqns, problems

    def _row_maps(self, fqns: Sequence[str]) -> tuple[dict[str, RowMap | None], list[str]]:
        """Return the row maps of what is resized, None for those without one; and what is wrong with them."""
        rules: dict[str, dict[str, RowMap | None]] = defaultdict(dict)
        for pattern, row_map in self.resize:
            for fqn in fqns:
                if fnmatchcase(fqn, pattern):
                    rules[fqn][pattern] = row_map
        problems = [
            f"  {fqn!r} has different row maps by {' and by '.join(map(repr, of))}"
            for fqn, of in rules.items()
            if len(set(of.values())) > 1
        ]
        return {fqn: next(iter(of.values())) for fqn, of in rules.items()}, problems

    def _unused(self, fqns: Sequence[str], loaded: Sequence[str]) -> Iterator[str]:
        """Yield the patterns that match nothing."""
        for name, patterns, names in (
            ("resize", [pattern for pattern, _ in self.resize], loaded),
            ("only", self.only or (), fqns),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(fqn, pattern) for fqn in names):
                    yield _UNUSED.format(name, pattern)


def _match(pattern: str, fqn: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), fqn, re.DOTALL)


def _moved_state(
    wanted: Mapping[str, Wanted], loaded: Sequence[str], saved_fqns: Mapping[str, str], manifest: Manifest
) -> Iterator[str]:
    """Yield the row-wise state that would be loaded without its table, whose shards it could not be placed by."""
    fqns = {saved_fqns.get(fqn, fqn): fqn for fqn in wanted if fqn in saved_fqns or fqn not in saved_fqns.values()}
    for fqn in loaded if saved_fqns else ():
        entry = manifest.tensors.get(saved_fqns.get(fqn, fqn))
        state = StateName.parse(fqn)
        if entry is None or entry.table is None or state is None:
            continue
        table = wanted.get(fqns.get(entry.table, ""))
        if table is None or weight_of(state.key, {table.name}) != table.name:
            yield f"  {fqn!r} and the table that the saved state belongs to, {entry.table!r}: rename both, or neither"


def _resize(
    wanted: Collection[Wanted], row_maps: Mapping[str, RowMap | None], skipped: Collection[str], manifest: Manifest
) -> tuple[Resize, set[str], list[str]]:
    """Return what is resized, what of it keeps its values, and what is wrong with it; all by saved FQN."""
    sizes = {item.fqn: item.size for item in wanted if item.fqn not in skipped}
    given = {fqn: row_map for fqn, row_map in row_maps.items() if row_map is not None}
    ids = carried_ids(sizes, {item.fqn: item.first_rows for item in wanted}, row_maps.keys(), given.keys(), manifest)
    by_fqn = {**given, **ids.row_maps}
    tables: dict[str, list[str]] = defaultdict(list)
    for item in wanted:
        tables[item.name].append(item.fqn)
    apart = []
    for fqn, size in sizes.items():
        state = StateName.parse(fqn)
        if state is None or not size or is_count(fqn, fqn):
            continue
        of_state = [table for table in tables.get(weight_of(state.key, tables), ()) if table in sizes]
        if of_state and by_fqn.get(fqn) not in [by_fqn.get(table) for table in of_state]:
            apart.append(f"  {fqn!r} and its table {of_state[0]!r}: give both the same row map")
    return Resize(row_maps.keys(), by_fqn, ids.renumbered), ids.kept, [*ids.problems, *apart]


def _matches(fqn: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _named(item: Wanted, saved_fqns: Mapping[str, str], manifest: Manifest) -> Wanted:
    """Return an item under the name that it has in the checkpoint."""
    if item.fqn not in saved_fqns:
        return item
    saved_fqn = saved_fqns[item.fqn]
    return replace(item, fqn=saved_fqn, name=str(manifest.paths.get(saved_fqn, (saved_fqn,))[-1]))


def _with_own_names(message: str, saved_fqns: Mapping[str, str]) -> str:
    """Return a message in which renamed items have their names in the state dict, too."""
    fqns = {repr(saved): fqn for fqn, saved in saved_fqns.items()}
    return re.sub(
        r"'[^']*'",
        lambda match: f"{fqns[match[0]]!r} (saved as {match[0]})" if match[0] in fqns else match[0],
        message,
    )


def _named_back(fitted: Fit, fqns: Mapping[str, str], skipped: Sequence[str]) -> Fit:
    """Return a decision by the names of the state dict; ``fqns`` has them by saved FQN, where they differ."""
    report = fitted.report
    sources = {fqns.get(fqn, fqn): source.under(fqns) for fqn, source in fitted.sources.items()}
    renamed = {fqns.get(fqn, fqn): saved for fqn, saved in report.renamed.items()}
    return replace(
        fitted,
        report=replace(
            report,
            loaded=tuple(sorted(sources)),
            missing=tuple(sorted(fqns.get(fqn, fqn) for fqn in report.missing)),
            reshaped={fqns.get(fqn, fqn): sizes for fqn, sizes in report.reshaped.items()},
            mapped_rows={fqns.get(fqn, fqn): num_rows for fqn, num_rows in report.mapped_rows.items()},
            renamed={**{fqn: saved for saved, fqn in fqns.items()}, **renamed},
            skipped=tuple(skipped),
        ),
        sources=sources,
    )
