"""Random checkpoints on purpose: whatever is in manifests and packs, readers load it or raise a typed error.

The digests are right, so that everything behind them is reached: a lineage made by hand is changed at random in its
manifests, its row codes, its objects' pickles and archives, and is then loaded, verified and inspected.
"""

import itertools
import pickletools
import shutil
import struct
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import zstandard
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.attacks.draft import INT, Draft, archive_of
from tests.attacks.structure import GLOBALS, INSTRUCTIONS
from tests.attacks.walk import load_state
from tests.format.test_manifest import DELETE, REPEAT, VALUES, changed, nodes
from torchrec_cnr.format import safe_pickle
from torchrec_cnr.format.row_sets import CodedRows, decode_row_numbers
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.verification.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

numbers = itertools.count()
bounded = hypothesis.settings(max_examples=100)
longer = hypothesis.settings(max_examples=3_000, suppress_health_check=list(hypothesis.HealthCheck))


def _read(root: Path) -> str:
    """Everything that reads the newest checkpoint; anything but a typed error is raised."""
    outcomes, messages = [], []
    for read in (
        load_state,
        verify,
        lambda path: read_lineage(path).newest.num_rows,
        lambda path: cnr.latest(path.parent),
    ):
        try:
            read(root / "step-2")
            outcomes.append("good")
        except cnr.CNRError as error:
            outcomes.append(type(error).__name__)
            messages.append(str(error))
    assert [message for message in messages if not message.isprintable()] == []  # no log or terminal fails, or obeys
    return outcomes[0]


def _write(root: Path, delta: Draft, baseline: Draft | None = None) -> None:
    digest = (baseline or Draft()).write(root / "step-1")
    if delta.body["parent"]["sha256"] == "0" * 64:
        delta.body["parent"]["sha256"] = digest
    delta.write(root / "step-2")


def _new_root(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp() / f"fuzzed-{next(numbers)}"


def _delta(**parts: Any) -> Draft:
    return Draft(2, ("step-1", "0" * 64), **parts)


@st.composite
def _bodies(draw: st.DrawFn, body: Any) -> Any:
    """A body with a few values replaced, left out or repeated."""
    paths = list(nodes(body))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths))
        to = draw(st.one_of(st.sampled_from([*VALUES, DELETE, REPEAT]), st.integers(-2, 2**63)))
        try:
            body = changed(body, path, to)
        except (KeyError, IndexError, TypeError, AttributeError):  # an earlier change removed it
            continue
    return body


def _fuzz_manifests(factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root, delta, baseline = _new_root(factory), _delta(), Draft()
    digest = baseline.write(root / "step-1")
    delta.body["parent"]["sha256"] = digest
    delta.write(root / "step-2")
    which = data.draw(st.sampled_from([delta, baseline]))
    which.body = data.draw(_bodies(which.body))
    try:
        if which is baseline:
            delta.body["parent"]["sha256"] = which.write(root / "step-1")
            delta.write(root / "step-2")
        elif not data.draw(st.booleans()) or not isinstance(which.body, dict):
            which.write(root / "step-2")
        else:  # as what replaces it
            committed = _delta()
            committed.body["parent"]["sha256"] = digest
            which.body["replaces"] = committed.write(root / "step-2")
            which.write(root / "step-2", f"manifest-{which.body['replaces']}.json")
    except (KeyError, TypeError):  # what the draft needs is gone
        hypothesis.reject()
    _read(root)
    shutil.rmtree(root)


@pytest.mark.long
@bounded
@hypothesis.given(data=st.data())
def test_whatever_a_manifest_says(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The head's manifest, its parent's, or one that replaces it, is changed: good, or a typed error."""
    _fuzz_manifests(tmp_path_factory, data)


@pytest.mark.slow
@longer
@hypothesis.given(data=st.data())
def test_whatever_a_manifest_says_for_longer(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """As above, many times."""
    _fuzz_manifests(tmp_path_factory, data)


@st.composite
def _codes(draw: st.DrawFn) -> tuple[Any, int, int, int, bytes]:
    """Coding, first row, span, number of rows and code, which mostly has the right length."""
    coding, num_rows = draw(st.sampled_from(["bitmap", "gaps"])), draw(st.integers(1, 40))
    span = draw(st.one_of(st.integers(num_rows, 70), st.integers(1, 2**20)))
    num_bytes = (span + 7) // 8 if coding == "bitmap" else (1 + (span > 257) + (span > 2**16 + 1)) * (num_rows - 1)
    content = draw(
        st.one_of(st.binary(min_size=min(num_bytes, 80), max_size=min(num_bytes, 80)), st.binary(max_size=40))
    )
    code = bytearray(zstandard.compress(content))
    if draw(st.booleans()):
        code[draw(st.integers(0, len(code) - 1))] = draw(st.integers(0, 255))
    return coding, draw(st.integers(0, 2**62)), span, num_rows, bytes(code)


def _fuzz_row_codes(coded_rows: tuple[Any, int, int, int, bytes]) -> None:
    coding, first, span, num_rows, code = coded_rows
    coded = CodedRows(coding, first, span, code)
    try:
        rows = decode_row_numbers(coded, num_rows, "here")
    except cnr.DamagedError:
        return
    assert (len(rows), rows[0], rows[-1]) == (num_rows, first, first + span - 1)
    assert (rows[1:] > rows[:-1]).all()


@pytest.mark.long
@hypothesis.settings(max_examples=500)
@hypothesis.given(coded_rows=_codes())
def test_whatever_row_codes_say(coded_rows: tuple[Any, int, int, int, bytes]) -> None:
    """Row numbers are as many, and as far apart, as the manifest says, or refused."""
    _fuzz_row_codes(coded_rows)


@pytest.mark.slow
@hypothesis.settings(max_examples=20_000)
@hypothesis.given(coded_rows=_codes())
def test_whatever_row_codes_say_for_longer(coded_rows: tuple[Any, int, int, int, bytes]) -> None:
    """As above, many times."""
    _fuzz_row_codes(coded_rows)


_pushes = st.one_of(
    st.sampled_from(GLOBALS),
    st.integers(-(2**70), 2**70).map(lambda n: b"\x8a" + bytes([9]) + n.to_bytes(9, "little", signed=True)),
    st.sampled_from(["", "latin1", "hex", "storage", "0", "cpu"]).map(
        lambda text: b"X" + struct.pack("<I", len(text)) + text.encode()
    ),
    st.sampled_from([b"]", b"}", b")", b"N", b"\x88", b"(", INT]),
    st.integers(0, 3).map(lambda index: b"h" + bytes([index])),
)
_programs = st.lists(
    st.one_of(_pushes, st.sampled_from(INSTRUCTIONS), st.integers(0, 3).map(lambda index: b"q" + bytes([index]))),
    max_size=30,
).map(lambda parts: INT + b"q\x00" + b"".join(parts) + b".")


def _fuzz_objects(factory: pytest.TempPathFactory, program: bytes, cut: int, is_compressed: bool) -> None:
    archive = archive_of(program, is_compressed)
    root = _new_root(factory)
    _write(root, _delta(archive=archive[:cut] + archive[cut + 1 :] if cut < len(archive) else archive))
    _read(root)
    shutil.rmtree(root)


_objects = hypothesis.given(program=_programs, cut=st.integers(0, 2_000), is_compressed=st.booleans())


@pytest.mark.long
@bounded
@hypothesis.example(program=INT + b"q\x00ctorch\nFloatStorage\n.", cut=2_000, is_compressed=False)
@_objects
def test_whatever_an_object_is(
    tmp_path_factory: pytest.TempPathFactory, program: bytes, cut: int, is_compressed: bool
) -> None:
    """Random programs for the unpickler, in archives that may be damaged: a value, or a typed error."""
    _fuzz_objects(tmp_path_factory, program, cut, is_compressed)


@pytest.mark.slow
@longer
@_objects
def test_whatever_an_object_is_for_longer(
    tmp_path_factory: pytest.TempPathFactory, program: bytes, cut: int, is_compressed: bool
) -> None:
    """As above, many times."""
    _fuzz_objects(tmp_path_factory, program, cut, is_compressed)


_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(min_size=1),
        st.sampled_from([torch.Size([2, 3]), torch.float16, torch.device("cpu"), complex(1, 2), bytearray(b"q")]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3),
        st.sets(st.integers(), max_size=3), st.dictionaries(st.tuples(st.text(), st.integers()), inner, max_size=2),
    ),
)  # fmt: skip


@pytest.mark.long
@hypothesis.settings(max_examples=150)
@hypothesis.given(value=_values)
def test_whatever_was_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    """What is looked through before it is unpickled is no less than torch itself loads: any value comes back."""
    file = tmp_path_factory.getbasetemp() / "value"
    torch.save(value, file)
    assert safe_pickle.load_state(file.read_bytes()) == torch.load(file, weights_only=True) == value


def test_instructions_of_random_programs_are_real() -> None:
    """The fuzzer speaks the unpickler's language: its instructions are ones that pickles have."""
    known = {opcode.code.encode("latin1") for opcode in pickletools.opcodes}
    assert set(INSTRUCTIONS) <= known
