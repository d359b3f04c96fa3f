"""What is in this folder, written again: ``python -m tests.attacks.write`` from the root of the project.

Each attack is a function that writes a root with a checkpoint ``step-1`` or, where there are two, ``step-2`` to be
loaded. What a repository cannot hold (pipes, links, files of terabytes) or should not (megabytes) is left out there.
"""

import base64
import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zstandard

from tests.attacks.draft import ALL, INT, NONE, Draft, archive_of, dumps, tensor, write_body

FOLDER = Path(__file__).parent / "files"
OUTSIDE = "outside"  # beside the roots: nothing in it is any of a checkpoint's business
CODE_RAN = "code-ran"
MKDIR = b"cposix\nmkdir\nX" + struct.pack("<I", len(CODE_RAN)) + CODE_RAN.encode() + b"\x85R."
HUGE = b"\x8a\x06" + (1 << 36).to_bytes(6, "little")  # a pickle's instruction for a number


@dataclass(frozen=True)
class Attack:
    """A way to do harm.

    Attributes:
        write: Writes it into a root.
        error: What a load says; None if it is harmless, and loads.
        is_kept: Whether it is kept in the repository.
        head: The checkpoint to load.
        opens: What of ``outside`` is read for it, because the format lets a lineage lead there.
    """

    write: Callable[[Path], object]
    error: str | None
    is_kept: bool = True
    head: str = "step-1"
    opens: tuple[str, ...] = ()

    @property
    def tries(self) -> str:
        """What it tries."""
        return (self.write.__doc__ or "").strip()


ATTACKS: dict[str, Attack] = {}


def attack(
    error: str | None, *, is_kept: bool = True, head: str = "step-1", opens: tuple[str, ...] = ()
) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Note an attack under the function's name."""

    def note(write: Callable[[Path], object]) -> Callable[[Path], object]:
        ATTACKS[write.__name__.replace("_", "-")] = Attack(write, error, is_kept, head, opens)
        return write

    return note


# Objects.


def _object(root: Path, pickled: bytes) -> None:
    Draft(archive=archive_of(pickled)).write(root / "step-1")


@attack("refused by the weights-only unpickler, which runs no code")
def pickle_calls(root: Path) -> None:
    """Runs code when it is unpickled."""
    _object(root, MKDIR)


@attack("a call of builtins.bytearray that no state dict needs")
def pickle_bytearray(root: Path) -> None:
    """Has 64 GiB of zeros made, by a class that weights-only unpicklers allow."""
    _object(root, b"c__builtin__\nbytearray\n" + HUGE + b"\x85R.")


@attack("a call of torch.Tensor that no state dict needs")
def pickle_tensor(root: Path) -> None:
    """Has 256 GiB of a tensor made, and written by whoever hands it on."""
    _object(root, b"ctorch\nTensor\n" + HUGE + b"\x85R.")


@attack("a call of builtins.bytearray that no state dict needs")
def pickle_by_case(root: Path) -> None:
    """The same, in `data.PKL`: torch finds the files of an archive without regard to case."""
    pickled = b"c__builtin__\nbytearray\n" + HUGE + b"\x85R."
    Draft(archive=archive_of(pickled, pickle_name="data.PKL")).write(root / "step-1")


@attack("an archive with compressed or repeated files")
def pickle_by_two_cases(root: Path) -> None:
    """Two pickles, whose names differ by case alone: one may be looked through, and the other loaded."""
    archive = io.BytesIO(archive_of(INT + b"."))
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(zipfile.ZipInfo("archive/DATA.pkl"), b"\x80\x02" + MKDIR)
    Draft(archive=archive.getvalue()).write(root / "step-1")


@attack("DeviceMesh, which has side effects when it is rebuilt")
def pickle_mesh(root: Path) -> None:
    """A mesh of devices, which starts torch.distributed where it is rebuilt."""
    _object(root, b"ctorch.distributed.device_mesh\nDeviceMesh\nX\x03\0\0\0cpu](K\0K\x01e\x86R.")


@attack("a call of builtins.bytearray that no state dict needs")
def pickle_by_proxy(root: Path) -> None:
    """The same as `pickle-bytearray`, called by a function that calls what it is given."""
    bomb = b"c__builtin__\nbytearray\nctorch\nTensor\n" + HUGE + b"\x85}t"
    _object(root, b"ctorch._tensor\n_rebuild_from_type_v2\n(" + bomb + b"R.")


@attack("a call of _codecs.encode that no state dict needs")
def pickle_doubles(root: Path) -> None:
    """Writes bytes as hexadecimal digits, forty times over, which doubles them each time."""
    text = b"X\x01\0\0\0aX\x06\0\0\0latin1\x86R"
    _object(root, b"c_codecs\nencode\n" * 41 + text + b"X\x03\0\0\0hex\x86R" * 40 + b".")


@attack("nested tuples that are hashed again and again")
def pickle_hashes(root: Path) -> None:
    """A key made of pairs of pairs, sixty deep: hashing it takes 2^60 steps."""
    pairs = b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
    _object(root, b"}" + INT + b"\x85q\x00" + pairs + INT + b"s.")


@attack("tuples nested more than 500 levels deep")
def pickle_deep_key(root: Path) -> None:
    """A key of 20,000 tuples within one another: hashing it may overflow the stack."""
    _object(root, b"}" + INT + b"\x85" * 20_000 + INT + b"s.")


@attack("object .seen.: it cannot be pickled again")
def pickle_deep_list(root: Path) -> None:
    """Lists within one another, deeper than Python recurses."""
    _object(root, b"]" * 5_000 + b"a" * 4_999 + b".")


@attack("an archive that is larger when decompressed")
def pickle_compressed(root: Path) -> None:
    """An archive that unpacks to a thousand times its size."""
    num_bytes = 16 << 20
    text = b"X" + struct.pack("<I", num_bytes) + b"a" * num_bytes + b"."
    Draft(archive=archive_of(text, is_compressed=True)).write(root / "step-1")


@attack("refused by the weights-only unpickler, which runs no code")
def pickle_unwrapped(root: Path) -> None:
    """A bare pickle that runs code, as old versions of torch wrote them."""
    Draft(archive=b"\x80\x02" + MKDIR).write(root / "step-1")


# JSON.


@attack("not a complete manifest")
def manifest_of_a_pickle(root: Path) -> None:
    """A pickle that runs code in the place of the manifest, as DCP's own metadata is one."""
    (root / "step-1").mkdir(parents=True)
    (root / "step-1" / "manifest.json").write_bytes(b"\x80\x02" + MKDIR)


@attack("not JSON|list")
def json_deep(root: Path) -> None:
    """Lists within one another, deeper than Python recurses."""
    body = dumps({**Draft().body, "paths": "@"}).replace(b'"@"', b"[" * 9_000 + b"]" * 9_000)
    write_body(root / "step-1" / "manifest.json", body)


@attack("not JSON")
def json_digits(root: Path) -> None:
    """A number of so many digits that reading it takes their square."""
    body = dumps(Draft().body).replace(b'"created_ns":1', b'"created_ns":1' + b"0" * 20_000)
    write_body(root / "step-1" / "manifest.json", body)


@attack("not written as manifests are")
def json_key_twice(root: Path) -> None:
    """Two parents, of which one reader takes the first, and another the last."""
    body = dumps(Draft().body).replace(b'"parent":null', b'"parent":{"path":"../x","sha256":""},"parent":null')
    write_body(root / "step-1" / "manifest.json", body)


@attack("parent")
def json_many_parents(root: Path) -> None:
    """A list of parents, each of which would have to be read."""
    draft = Draft()
    draft.body["parent"] = [{"path": "../step-1", "sha256": "0" * 64}] * 100
    draft.write(root / "step-1")


@attack("1000 dimensions, expected 64 at most")
def json_dimensions(root: Path) -> None:
    """A tensor of so many dimensions that their product takes long."""
    draft = Draft()
    draft.body["tensors"]["table"]["size"] = [2**62] * 1000
    draft.write(root / "step-1")


@attack("9000 characters, expected 8192 at most")
def json_long_name(root: Path) -> None:
    """A name that is long, and would be in the name of each of many blobs."""
    draft = Draft()
    draft.body["tensors"]["x" * 9000] = draft.body["tensors"].pop("table")
    draft.write(root / "step-1")


@attack("divide more than 8 dimensions")
def json_divided(root: Path) -> None:
    """Few boxes that divide a tensor in twenty dimensions: they have millions of corners."""
    whole = [2] * 20
    boxes = []
    for dimension in range(20):
        sizes = [1] * dimension + whole[dimension:]
        boxes.append([[0] * dimension + [1] + [0] * (19 - dimension), [*sizes[:dimension], 1, *sizes[dimension + 1 :]]])
    draft = Draft()
    shards = [[box, None, 0, [draft.blob(b"0")], NONE] for box in boxes]
    draft.body["tensors"]["cube"] = tensor(shards, whole)
    draft.write(root / "step-1")


# Packed manifests.


def _packed(root: Path, values: bytes) -> None:
    """A manifest with more values than it should have."""
    body = dumps({**Draft().body, "paths": "@"}).replace(b'"@"', values)
    frame = base64.b64encode(zstandard.compress(body)).decode()
    packed = {"format": "torchrec_cnr", "version": 1, "created_ns": 1, "zstd": frame}
    write_body(root / "step-1" / "manifest.json", dumps(packed))


@attack("decompresses to 134\\d{6} bytes, expected at most 32 times as many")
def packed_values(root: Path) -> None:
    """A file of 17 KB that unpacks to 128 MiB, and these to 45 million lists, which take 4 GB."""
    _packed(root, b"[" + b"[]," * 44_739_242 + b"[]]")


@attack("expected at most 32 times as many, with fewer values", is_kept=False)
def packed_values_in_noise(root: Path) -> None:
    """The same within the ratio that a frame may have: 5 MB of lists, packed beside 200 KB that are at random."""
    noise = base64.b64encode(random.Random(1).randbytes(200_000))
    _packed(root, b'["' + noise + b'"' + b",[]" * 1_800_000 + b"]")


# Paths.


def _parent(root: Path, path: str, sha256: str = "0" * 64) -> None:
    draft = Draft(2, ("step-1", sha256))
    draft.body["parent"]["path"] = path
    draft.write(root / "step-2")


@attack("parent path", head="step-2")
def parent_absolute(root: Path) -> None:
    """A parent anywhere on the machine."""
    _parent(root, f"/{OUTSIDE}/step-1")


@attack("parent path", head="step-2")
def parent_by_scheme(root: Path) -> None:
    """A parent in another store, fetched through whatever fsspec can."""
    _parent(root, f"../simplecache::file://{OUTSIDE}/step-1")


@attack("parent path", head="step-2")
def parent_winding(root: Path) -> None:
    """A parent by way of a directory that leads up again."""
    _parent(root, f"../step-1/../../{OUTSIDE}/step-1")


@attack("leads out of the store", head="step-2")
def parent_above_the_top(root: Path) -> None:
    """A parent above the top of the file system."""
    _parent(root, "../" * 60 + f"{OUTSIDE}/step-1")


@attack("was replaced", head="step-2", opens=("step-1/manifest.json",))
def parent_of_another(root: Path) -> None:
    """A checkpoint of another root, as a parent may be, but not the one whose digest is given."""
    _parent(root, f"../../{OUTSIDE}/step-1")


@attack("packs: unexpected value")
def pack_winding(root: Path) -> None:
    """A pack that is a file of another directory."""
    Draft().write(root / "step-1", file=f"../../{OUTSIDE}/secret.safetensors")


def _pack_of_another(root: Path, directory: str) -> None:
    draft = Draft()
    digest = draft.write(root / "step-1")
    draft.body["replaces"] = digest
    draft.body["packs"][0][0] = directory
    draft.write(root / "step-1", f"manifest-{digest}.json")


@attack("packs: unexpected value")
def pack_absolute(root: Path) -> None:
    """A pack anywhere on the machine."""
    _pack_of_another(root, f"/{OUTSIDE}")


@attack("leads out of the store")
def pack_above_the_top(root: Path) -> None:
    """A pack above the top of the file system."""
    _pack_of_another(root, "../" * 60 + OUTSIDE)


# Cycles.


@attack("its own descendant", head="step-2")
def cycle_of_itself(root: Path) -> None:
    """A checkpoint that is its own parent."""
    _parent(root, "../step-2")


@attack("its own descendant", head="step-2")
def cycle_of_two(root: Path) -> None:
    """Two checkpoints that are parents of each other."""
    first = Draft(1, ("step-2", "0" * 64))
    _parent(root, "../step-1", first.write(root / "step-1"))


@attack("it replaces manifest .*, not the one that its name says")
def cycle_of_replacements(root: Path) -> None:
    """Replacements that take the place of one another, for ever."""
    draft = Draft()
    digest = draft.write(root / "step-1")
    draft.body["replaces"] = digest
    second = draft.write(root / "step-1", f"manifest-{digest}.json")
    shutil.copy(root / "step-1" / f"manifest-{digest}.json", root / "step-1" / f"manifest-{second}.json")


@attack("expected one that replaces none")
def cycle_of_the_first(root: Path) -> None:
    """A manifest that commits a checkpoint, and replaces another one all the same."""
    draft = Draft()
    draft.body["replaces"] = "0" * 64
    draft.write(root / "step-1")


# Sizes.


def _delta(root: Path, coding: str, span: int, num_rows: int, code: bytes) -> None:
    parent = ("step-1", Draft().write(root / "step-1"))
    Draft(2, parent, coded=(coding, span, num_rows, code)).write(root / "step-2")


def _frame(num_bytes: int, num_blocks: int) -> bytes:
    """A frame that says it has so many bytes, in blocks of 128 KiB of zeros."""
    size = b"\x28\xb5\x2f\xfd\xe0" + num_bytes.to_bytes(8, "little")  # one segment, 8 bytes of size
    blocks = [((1 << 17) << 3 | 1 << 1 | (number == num_blocks - 1)) for number in range(num_blocks)]
    return size + b"".join(block.to_bytes(3, "little") + b"\0" for block in blocks)


@attack("row numbers", head="step-2")
def frame_that_lies(root: Path) -> None:
    """A code that is said to be one byte, and unpacks to 512 MiB."""
    _delta(root, "gaps", 3, 2, _frame(1, 4096))


@attack("a bitmap of", head="step-2")
def frame_of_a_bitmap(root: Path) -> None:
    """A bitmap of two rows, and 2^40 bits between them."""
    _delta(root, "bitmap", 1 << 40, 2, _frame(1 << 37, 10))


@attack("rows, expected 16777216 at most", head="step-2")
def frame_of_gaps(root: Path) -> None:
    """A code of 2^40 rows."""
    _delta(root, "gaps", 1 << 40, 1 << 40, _frame(1 << 40, 10))


def _split(root: Path, blob: bytes) -> None:
    """A table whose rows are in one blob, split."""
    draft = Draft(values=blob)
    draft.write(root / "step-1")


@attack("decompress to 5 bytes, expected 128")
def split_that_lies(root: Path) -> None:
    """A split blob whose frame does not hold its rows."""
    _split(root, _frame(5, 1))


@attack("tails")
def split_that_is_longer(root: Path) -> None:
    """A split blob whose frame says that it holds its rows, and unpacks to 2.5 MiB."""
    _split(root, _frame(128, 20))


@attack("block 0 has 53 bytes, its 16777216 rows need")
def split_of_ones(root: Path) -> None:
    """A table of 8 GiB in blobs of a few bytes, all as they are said to be: all its rows are alike."""
    num_rows, num_blocks = 1 << 24, 128
    draft = Draft()
    blobs = [draft.blob(_frame(num_rows * 4, 10)) for _ in range(num_blocks)]
    blocks = [["all", number * num_rows, num_rows, num_rows, None] for number in range(num_blocks)]
    size = [num_blocks * num_rows, 1]
    draft.body["row_sets"] = [ALL, blocks]
    draft.body["tensors"]["ones"] = tensor([[[[0, 0], size], None, 1, blobs, NONE]], size)
    draft.write(root / "step-1")


def _claim(root: Path, num_rows: int) -> Draft:
    draft = Draft()
    draft.body |= {"row_sets": [[["all", 0, num_rows, num_rows, None]]], "objects": {}, "paths": {}}
    draft.shard[0] = [[0, 0], [num_rows, 4]]
    draft.shard[3][0][2] = 16 * num_rows
    draft.body["tensors"]["table"]["size"] = [num_rows, 4]
    draft.write(root / "step-1", num_bytes=10 + 16 * num_rows)
    return draft


@attack("StateMismatchError|truncated")
def size_that_is_not_there(root: Path) -> None:
    """A table of 2^50 rows, which the manifest says are all in the pack."""
    _claim(root, 1 << 50)


@attack("StateMismatchError|truncated")
def size_of_a_few_gib(root: Path) -> None:
    """A table of 16 GiB, which might be there, and is not."""
    _claim(root, 1 << 30)


@attack("StateMismatchError|nowhere stored")
def size_of_a_folded_table(root: Path) -> None:
    """A table of 2^45 rows, of which a replacement stores eight."""
    draft = Draft()
    draft.body["tensors"]["table"] |= {"size": [2**45, 4], "folded": [[[[0, 0], [2**45, 4]], None]]}
    draft.shard[0] = [[0, 0], [2**45, 4]]
    draft.body["row_sets"] = [ALL]
    draft.body["parent"] = {"path": "../step-0", "sha256": "0" * 64}
    digest = draft.write(root / "step-1")
    draft.body |= {"replaces": digest, "parent": None}
    draft.write(root / "step-1", f"manifest-{digest}.json")


@attack("StateMismatchError|truncated")
def size_of_a_replaced_table(root: Path) -> None:
    """A table of 2^50 rows, all of which a replacement has, and which are not there."""
    _replace(root, _claim(root, 1 << 50), "table")


@attack(None)
def size_without_columns(root: Path) -> None:
    """A tensor of 2^50 rows without columns, in a replacement: all that goes through its rows takes as long."""
    num_rows = 1 << 50
    draft = Draft()
    draft.body["row_sets"].append([["all", 0, num_rows, num_rows, None]])
    draft.body["tensors"]["zeros"] = tensor([[[[0, 0], [num_rows, 0]], None, 1, [], NONE]], [num_rows, 0])
    draft.write(root / "step-1")
    _replace(root, draft, "zeros")


def _replace(root: Path, draft: Draft, fqn: str) -> None:
    """Write a replacement that says the same, with a tensor that is folded."""
    manifest = root / "step-1" / "manifest.json"
    digest = json.loads(manifest.read_bytes())["sha256"]
    entry = draft.body["tensors"][fqn]
    entry["folded"] = [[shard[0], None] for shard in entry["shards"]]
    draft.body["replaces"] = digest
    write_body(root / "step-1" / f"manifest-{digest}.json", dumps(draft.body))


@attack("integer")
def size_beyond_integers(root: Path) -> None:
    """Offsets that overflow 64 bits when they are added."""
    draft = Draft()
    draft.shard[3][0][1] = 2**63 - 1
    draft.write(root / "step-1", num_bytes=2**63)


# What is no file.


@attack("a pipe, a device or a socket", is_kept=False)
def manifest_that_is_a_pipe(root: Path) -> None:
    """A manifest that nobody ever writes: whoever opens it waits."""
    (root / "step-1").mkdir(parents=True)
    os.mkfifo(root / "step-1" / "manifest.json")


@attack("a symbolic link", is_kept=False)
def manifest_without_end(root: Path) -> None:
    """A manifest that is a device of zeros."""
    (root / "step-1").mkdir(parents=True)
    (root / "step-1" / "manifest.json").symlink_to("/dev/zero")


@attack("a symbolic link", is_kept=False)
def manifest_of_another(root: Path) -> None:
    """A manifest that is a link to a file of somebody else."""
    (root / "step-1").mkdir(parents=True)
    (root / "step-1" / "manifest.json").symlink_to(f"../../{OUTSIDE}/step-1/manifest.json")


@attack("expected at most 1073741824 bytes, got more", is_kept=False)
def manifest_of_terabytes(root: Path) -> None:
    """A manifest of a terabyte, in a file that takes no room."""
    (root / "step-1").mkdir(parents=True)
    with (root / "step-1" / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)


@attack("a pipe, a device or a socket", is_kept=False)
def replacement_that_is_a_pipe(root: Path) -> None:
    """A replacement that nobody ever writes."""
    digest = Draft().write(root / "step-1")
    os.mkfifo(root / "step-1" / f"manifest-{digest}.json")


@attack("a pipe, a device or a socket", is_kept=False)
def pack_that_is_a_pipe(root: Path) -> None:
    """A pack that nobody ever writes."""
    Draft().write(root / "step-1")
    (root / "step-1" / "a1-0-0.safetensors").unlink()
    os.mkfifo(root / "step-1" / "a1-0-0.safetensors")


@attack("a symbolic link", is_kept=False)
def pack_of_a_link(root: Path) -> None:
    """A pack that is a link to a file of somebody else, whose digests an error would tell."""
    Draft().write(root / "step-1")
    (root / "step-1" / "a1-0-0.safetensors").unlink()
    (root / "step-1" / "a1-0-0.safetensors").symlink_to(f"../../{OUTSIDE}/secret.safetensors")


# What takes long.


@attack("do not fill", is_kept=False)
def many_columns(root: Path) -> None:
    """10,000 boxes side by side, which all have the same rows: comparing each with each takes their square."""
    count = 10_000
    draft = Draft()
    shards = [[[[0, number], [1, 1]], None, 1, [[0, 10 + 4 * number, 4, 0]], NONE] for number in range(count)]
    shards[-1][0] = shards[-2][0]
    draft.body["row_sets"].append([["all", 0, 1, 1, None]])
    draft.body["tensors"]["table"] = tensor(shards, [1, count])
    draft.write(root / "step-1", num_bytes=1 << 40)


@attack("a hole", is_kept=False)
def many_shards_of_many_blocks(root: Path) -> None:
    """10,000 shards without columns that share one row set of as many blocks."""
    count = 10_000
    draft = Draft()
    draft.body["row_sets"].append([["all", 2 * number, 1, 1, None] for number in range(count)])
    box = [[0, 0], [2 * count, 0]]
    draft.body["tensors"]["zeros"] = tensor([[box, None, 1, [], NONE] for _ in range(count)], [2 * count, 0])
    draft.shard[3][0][1] += 1
    draft.body["parent"] = {"path": "../step-0", "sha256": "0" * 64}
    draft.write(root / "step-1")


@attack(None, is_kept=False)
def many_row_sets(root: Path) -> None:
    """3,000 tensors with a row set each: looking through all of them for each tensor takes their square."""
    count = 3_000
    draft = Draft()
    for number in range(9, count):
        draft.body["row_sets"].append([["all", 0, number, number, None]])
        shard = [[[0, 0], [number, 0]], None, number - 8, [], NONE]
        draft.body["tensors"][f"t{number}"] = tensor([shard], [number, 0], is_table=False)
    draft.write(root / "step-1")


# What does no harm.


@attack(None)
def notes_that_are_none(root: Path) -> None:
    """Metrics, tags, leases and a journal that nobody can make sense of."""
    Draft().write(root / "step-1")
    (root / "step-1" / f"metrics-{1:020d}-{'0' * 16}.json").write_text('{"auc":' * 2_000)
    (root / "step-1" / f"{'0' * 16}.{'9' * 20}.load.lease").write_bytes(b"")
    (root / "step-1" / f"{'0' * 16}.{'9' * 21}.load.lease").write_bytes(b"")
    (root / "journal").mkdir()
    (root / "journal" / f"{1:020d}-{'0' * 16}.json").write_text("[" * 2_000)
    told = {"format": "torchrec_cnr journal", "version": 1, "pruned": [["../x"]], "died": ["../x"], "prunes": []}
    (root / "journal" / f"{2:020d}-{'0' * 16}.json").write_text(json.dumps(told))


@attack(None, is_kept=False)
def notes_that_are_pipes(root: Path) -> None:
    """Metrics and a journal that nobody ever writes; a directory that is in itself."""
    Draft().write(root / "step-1")
    os.mkfifo(root / "step-1" / f"metrics-{1:020d}-{'0' * 16}.json")
    (root / "journal").mkdir()
    os.mkfifo(root / "journal" / f"{1:020d}-{'0' * 16}.json")
    (root / "step-1" / "loop").symlink_to(".")
    (root / "loop").symlink_to(".")


@attack(None, head="step-2")
def nothing(root: Path) -> None:
    """No harm: what the others are made from loads."""
    Draft(2, ("step-1", Draft().write(root / "step-1"))).write(root / "step-2")


def write(folder: Path, is_for_repository: bool = False) -> None:
    """Write all attacks into directories of their own, and what is not theirs beside them."""
    outside = Draft()
    outside.body["writer"] = "somebody else"
    outside.write(folder / OUTSIDE / "step-1")
    (folder / OUTSIDE / "secret.safetensors").write_bytes(b"secret")
    for name, made in ATTACKS.items():
        if made.is_kept or not is_for_repository:
            made.write(folder / name)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    write(FOLDER, is_for_repository=True)
