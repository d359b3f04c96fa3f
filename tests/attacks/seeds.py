"""Seeds: for each reader, inputs that the library itself has written, from which the fuzzer starts."""

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import torchrec_cnr as cnr
from tests.attacks import checkpoints
from tests.attacks.draft import Draft
from tests.attacks.readers import DCP_SIZE, READERS, SCHEMES, dcp_archive, dcp_metadata_of
from torchrec_cnr.format.blob_bytes import split, with_exact_rows
from torchrec_cnr.format.manifest import DTYPES, MANIFEST_FILE
from torchrec_cnr.format.row_sets import encode_row_numbers
from torchrec_cnr.kafka.records import marker_json
from torchrec_cnr.kafka.topics import TopicRules
from torchrec_cnr.lineage import journal
from torchrec_cnr.quantization.learned_transform import ErrorLimit, learned
from torchrec_cnr.quantization.packed_rows import pack_rows
from torchrec_cnr.storage.fences import JobFences
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.row_log import Marker
from torchrec_cnr.storage.store import Store

_GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
_TRANSFORMED = _GOLDEN.parent / "v1_transformed"
_FRAME_BYTES = (len('{"sha256":"","manifest":') + 64, len("}\n"))  # around the body of a manifest
_MAX_GOLDEN_BYTES = 9_000  # of a manifest: larger ones take long to read
_SHA256 = "ab" * 32


def seeds(reader: str) -> list[bytes]:
    """What the library has written for a reader."""
    return _SEEDS[reader]()


def _golden(pattern: str = "manifest*.json") -> list[bytes]:
    return [path.read_bytes() for path in sorted([*_GOLDEN.glob(f"*/*/{pattern}"), *_TRANSFORMED.glob(f"*/{pattern}")])]


def _bodies() -> list[bytes]:
    """Those of small manifests; the corpus has more."""
    begin, end = _FRAME_BYTES
    golden = (file[begin:-end] for file in _golden() if b'"zstd"' not in file)
    own = [data.partition(b"\n")[0] for data in checkpoints.seeds()]
    return [*own, *(body for body in golden if len(body) < _MAX_GOLDEN_BYTES)]


def _manifest_files() -> list[bytes]:
    """Those of the golden checkpoints, and one with the ids that the reader looks for."""
    with TemporaryDirectory() as folder:
        Draft(2).write(Path(folder))
        small = [file for file in _golden(MANIFEST_FILE) if len(file) < _MAX_GOLDEN_BYTES]
        return [*small, Path(folder, MANIFEST_FILE).read_bytes()]


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _archives() -> list[bytes]:
    parameter = torch.nn.Parameter(torch.ones(2))
    values = [
        1, [1, 2.5, None, True, "text", b"bytes"], {"a": (1, 2), "b": {1, 2}}, OrderedDict(a=1), torch.Size([2, 3]),
        torch.arange(3), torch.ones(2, 3).half().t(), {"p": parameter}, torch.device("cpu"), bytearray(b"x"), 1 << 80,
    ]  # fmt: skip
    return [_saved(value) for value in values]


def _pickles() -> list[bytes]:
    found = []
    for data in _archives():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            found.append(archive.read(name)[2:])
    return [pickled for pickled in found if b"Storage" not in pickled]  # whose values are in other files


def _row_codes() -> list[bytes]:
    found = []
    for rows in ([1], [1, 2, 5, 900], list(range(1, 64, 2)), [1, 2, 300_000]):
        coded = encode_row_numbers(np.array(rows, dtype=np.int64))
        coding = bytes([coded.coding == "bitmap"])
        head = (coded.span - 1).to_bytes(4, "little") + (len(rows) - 1).to_bytes(3, "little")
        found.append(coding + head + coded.data)
    return found


def _blobs() -> list[bytes]:
    dtypes = list(DTYPES)
    found = []
    for number, scheme in enumerate(SCHEMES):
        values = (torch.arange(96.0).view(32, 3) % 7) / 7
        values[5] = torch.nan
        encoded = scheme.encode(values)
        codes = encoded.codes.numpy()
        head = bytes([number, dtypes.index("float32"), 2]) + (31).to_bytes(2, "little")
        exact = encoded.exact.numpy()
        found.append(head + with_exact_rows(codes, exact, values.numpy()[exact].view(np.uint8)).tobytes())
        values = torch.arange(600.0).view(200, 3).sin()
        whole = scheme.encode(values).codes.numpy()
        if (data := split(whole, scheme.tail_bytes(3, torch.float32))) is not None:
            found.append(head[:3] + (199).to_bytes(2, "little") + data.tobytes())
    found.append(bytes([0, dtypes.index("bool"), 0, 1, 0]) + b"\1\0")
    return found


def _packed_rows() -> list[bytes]:
    """Of one strip and of two."""
    found = []
    for num_rows, num_cols in ((3, 1), (40, 5), (4_100, 2)):
        rows = np.random.default_rng(num_rows).normal(size=(num_rows, num_cols)) ** 3
        transform = learned(rows, ErrorLimit.of(np.linalg.norm(rows, axis=1), np.full(len(rows), 0.3), math.inf), None)
        numbers = np.rint(rows / transform.step).astype(np.int16)
        head = bytes([num_cols - 1]) + (num_rows - 1).to_bytes(2, "little")
        found.append(head + transform.data + pack_rows(numbers, transform).tobytes())
    return found


def _kafka_packs() -> list[bytes]:
    """The packs of the golden log, cut to the records that hold them."""
    records = json.loads((_GOLDEN / "logged" / "log.json").read_text())
    found = []
    for manifest in (json.loads(file)["manifest"] for file in _golden()):
        for _, name, num_bytes, *_, log in manifest.get("packs", ()):
            if log is not None:
                topic, partition, first, last, *rest = log
                own = [_record(record) for record in records[first : last + 1]]
                found.append([name, num_bytes, [topic, partition, 0, last - first, *rest], own])
    return [json.dumps(pack, separators=(",", ":")).encode() for pack in found]


def _record(record: dict[str, str]) -> list[object]:
    headers = [["part", record["part"]], *([["pack", record["pack"]]] if "pack" in record else [])]
    return [record["key"], bytes.fromhex(record["value"]).decode("latin1"), headers]


def _markers() -> list[bytes]:
    marker = Marker("0" * 16, "step-1", "5a7e", _SHA256, None, 1)
    return [marker_json(marker), marker_json(replace(marker, name="\u00e9 1", parent_sha256=_SHA256))]


def _topic_settings() -> list[bytes]:
    kinds = [TopicRules("rows", 4, secs, 1 << 20, 3, is_compacted) for secs in (None, 1.0) for is_compacted in (0, 1)]
    return [json.dumps(kind.settings).encode() for kind in kinds]


def _written(write: Callable[[Store], object], pattern: str) -> list[bytes]:
    """The files that something writes into a directory."""
    with TemporaryDirectory() as folder:
        write(Store.open(folder))
        return [path.read_bytes() for path in sorted(Path(folder).glob(pattern))]


def _journal(store: Store) -> None:
    pruned = cnr.PrunedCheckpoint(
        "step-1", 1, "delta", 2, 3, 4, "step-0", 5, 6, ("5a7e",), compactions=((7, 8),), log_bytes=9
    )
    told = journal.Journal((pruned, replace(pruned, name="step-0", kind="baseline", parent=None, log_bytes=0)))
    journal.write_file(store, told, 1)
    journal.write_file(store, replace(told, died=frozenset({"step-9"}), prunes=(cnr.Prune(9, "step-1", 10),)), 2)


def _metrics(store: Store) -> None:
    Draft().write(Path(store.path))
    cnr.write_metrics(store.path, {"auc": 0.8, "loss": float("inf")})


def _file_names() -> list[bytes]:
    names = [
        "manifest.json", f"manifest-{_SHA256}.json", f"{0:016x}-0-0.safetensors", f"{0:016x}.uncommitted.json",
        f"{0:016x}.{1 << 62}.load.lease", f"metrics-{1:020d}-{0:016x}.json", "release.tag", "needed-by-a-01234567.tag",
        "fence-00000001.json", f"step-1.{0:016x}.abandoned", f"{0:016x}.{1:020d}-{0:016x}.json", "journal+", "a::b+",
    ]  # fmt: skip
    return ["\n".join(names).encode(), "\udc80+\n\x1b[31m+\nfile:~\n%s+".encode(errors="surrogateescape")]


def _reader_states() -> list[bytes]:
    return [*cnr.ReaderState([1, 2]).state_dict().values(), _saved({"num_passes": 1, "loader": {"num_batches": 2}})]


def _dcp_files() -> list[bytes]:
    return [dcp_archive(), _saved(torch.ones(DCP_SIZE[::-1]).t()), _saved(torch.ones(9)[1:].view(DCP_SIZE))]


_SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "manifests": _bodies,
    "packed_manifests": _bodies,
    "manifest_files": _manifest_files,
    "pickles": _pickles,
    "archives": _archives,
    "reader_states": _reader_states,
    "row_codes": _row_codes,
    "blobs": _blobs,
    "packed_rows": _packed_rows,
    "kafka_packs": _kafka_packs,
    "markers": _markers,
    "topic_settings": _topic_settings,
    "loads": checkpoints.seeds,
    "checks": checkpoints.seeds,
    "updates": checkpoints.seeds,
    "upkeep": checkpoints.seeds,
    "fence_files": lambda: _written(lambda store: JobFences().fence(store).claim(), "fence-*"),
    "lease_files": lambda: _written(lambda store: Lease.take(store, "load"), "*.lease"),
    "journal_files": lambda: _written(_journal, "*.json"),
    "metric_files": lambda: _written(_metrics, "metrics-*"),
    "file_names": _file_names,
    "dcp_metadata": lambda: [pickle.dumps(dcp_metadata_of(len(dcp_archive())))],
    "dcp_files": _dcp_files,
}
assert _SEEDS.keys() == READERS.keys()
