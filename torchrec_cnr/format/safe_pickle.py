"""Pickles of others, looked through before they are loaded: what they would cost, and what they would call.

An unpickler that runs no code can still be made to take all memory or time there is: by an archive that unpacks to a
thousand times its size, by a call that allocates as many bytes as a number says, by tuples of tuples that are hashed
again and again. So the instructions of a pickle are gone through one by one, with nothing in the place of each value
but what is to be known of it. Then the archive is put together anew from what was looked at, and torch loads that.
"""

import io
import os
import pickle
import pickletools
import re
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from torchrec_cnr.errors import ConfigurationError, DamagedError

ARCHIVE_BEGIN = b"PK\x03\x04"  # of a file of torch.save
# Its end: the 64-bit record of the central directory, with size and offset; its locator; and the 32-bit record.
_ARCHIVE_END = struct.Struct("<4s36x2Q4s4xQ4x4s18x")
_END_MARKS = (b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06")
_MAX_DEPTH = 500  # of tuples; hashing one of more may overflow the stack
_FREE_WORK = 1 << 24  # values to be hashed, in any pickle
_WORK_PER_BYTE = 16
_MAX_WEIGHT = 1 << 62  # nobody needs to know it more closely
_MAX_TENSOR_WEIGHT = 1 << 20  # bytes of its pickle, without its values
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST")
_IN_PLACE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_ENCODE = "_codecs.encode"  # how bytes are written
_REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Their types act when they are rebuilt: a DeviceMesh starts torch.distributed. These do not.
_ACTING = re.compile(r"torch\.distributed\.(?!tensor\.placement_types\.|checkpoint\.(metadata|filesystem)\.)")
# They allocate what a number says, or take one tensor for another: no state needs to call them.
_ALLOCATING = re.compile(r"torch\.(?!distributed\.)(\w+\.)*(\w*(Tensor|Storage)|_rebuild_device_tensor_\w+)")
_CONTAINERS = {"builtins.set", "builtins.frozenset", "collections.Counter", "collections.OrderedDict", "torch.Size"}


class _Costly(Exception):
    """A pickle asks for more than it should."""


class _Acting(Exception):
    """A pickle names a type that acts when it is rebuilt."""


@dataclass(eq=False, slots=True)
class _Value:
    """What is to be known of a value.

    Attributes:
        weight: Values in it, those that are in it twice counted twice.
        depth: How deep they lie.
        name: Of what it is: a global's own, in full, or of what made it.
        is_global: Whether it is a global.
        text: What it is, if it is a string.
        items: What is in it, if it is a tuple.
    """

    weight: int = 1
    depth: int = 0
    name: str = ""
    is_global: bool = False
    text: str | None = None
    items: tuple["_Value", ...] = ()


def load_state(data: bytes) -> Any:
    """Load what ``torch.save`` wrote, without running code, in time and memory that its size bounds.

    Raises:
        Exception: Of any type: it is something else, or needs types that are not registered.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise _Costly("an archive that is longer unpacked than packed")
        contents = {entry.filename: archive.read(entry) for entry in entries if _is_stored(entry)}
    if len({name.lower() for name in contents}) != len(entries):  # torch compares them without case
        raise _Costly("an archive with compressed or repeated files")
    for name, content in contents.items():
        if _is_pickle(name):
            check_pickle(content)
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(rebuilt, "w") as archive:  # so that torch cannot find another meaning in the same bytes
        for name, content in contents.items():
            archive.writestr(name, content)
    rebuilt.seek(0)
    return torch.load(rebuilt, weights_only=True)


def check_archive(file: IO[bytes] | io.RawIOBase) -> None:
    """Look through the pickle of one tensor, in an archive that is too long to be read as a whole.

    Raises:
        Exception: Of any type: it would take time or memory out of proportion, or is no such archive.
    """
    _check_layout(file)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not _is_stored(entry):
                raise _Costly("an archive with compressed files")
            if _is_pickle(entry.filename):
                if entry.file_size > _MAX_TENSOR_WEIGHT:
                    raise _Costly(f"{entry.file_size} bytes of a pickle")
                check_pickle(archive.read(entry))


def _check_layout(file: IO[bytes] | io.RawIOBase) -> None:
    """Refuse an archive that does not begin and end as torch writes it: zipfile and torch may find other files in it.

    torch takes one that begins otherwise for a bare pickle. Where the offset of the central directory is not its place,
    as after bytes in front of an archive, zipfile corrects it, and torch does not.
    """
    file.seek(0)
    begin = file.read(len(ARCHIVE_BEGIN))
    at = max(0, file.seek(0, os.SEEK_END) - _ARCHIVE_END.size)
    file.seek(at)
    end = file.read(_ARCHIVE_END.size) or b""
    if len(end) == _ARCHIVE_END.size and begin == ARCHIVE_BEGIN:
        record, num_bytes, start, locator, record_at, last = _ARCHIVE_END.unpack(end)
        if (record, locator, last) == _END_MARKS and record_at == start + num_bytes == at:
            return
    raise _Costly("an archive of another layout than torch's")


def _is_pickle(name: str) -> bool:
    """Whether torch may take a file in an archive for a pickle; it finds files without regard to case."""
    return name.lower().endswith(".pkl")


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    """Whether a file in an archive is there as it is, as ``torch.save`` writes it."""
    return entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size


def check_pickle(data: bytes) -> None:
    """Refuse a pickle that would take time or memory out of proportion.

    Raises:
        Exception: Of any type: it does, or is no pickle.
    """
    stack: list[_Value | None] = []  # None for a mark
    memo: dict[int, _Value] = {}
    work = 0
    argument: Any
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name in _PUTS:
            index = len(memo) if argument is None else argument
            if index > number:
                raise _Costly(f"place {index} of its memo")
            memo[index] = _top(stack)
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            stack.append(None)
        elif not opcode.stack_before and name not in ("GLOBAL", "INST"):
            if opcode.stack_after:
                stack.append(_Value(text=argument) if isinstance(argument, str) else _Value())
        else:
            taken = _taken(stack, opcode)
            work += _hashed(name, taken)
            if work > _FREE_WORK + _WORK_PER_BYTE * len(data):
                raise _Costly("tuples within tuples that are hashed again and again")
            stack += _given(opcode, argument, taken)


def _top(stack: Sequence[_Value | None]) -> _Value:
    top = stack[-1]
    if top is None:
        raise _Costly("a mark that is taken for a value")
    return top


def _taken(stack: list[_Value | None], opcode: pickletools.OpcodeInfo) -> list[_Value]:
    """What an instruction takes off the stack."""
    taken: list[_Value] = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while (value := stack.pop()) is not None:
                taken.append(value)
        elif kind is not pickletools.markobject:
            taken.append(_top(stack))
            stack.pop()
    return taken[::-1]


def _hashed(name: str, taken: Sequence[_Value]) -> int:
    """How much of what an instruction takes it hashes."""
    if name in ("SETITEM", "SETITEMS"):
        return sum(value.weight for value in taken[1::2])
    return sum(value.weight for value in taken) if name in ("ADDITEMS", "FROZENSET", *_CALLS) else 0


def _given(opcode: pickletools.OpcodeInfo, argument: object, taken: Sequence[_Value]) -> list[_Value]:
    """What an instruction puts onto the stack."""
    name = opcode.name
    weight = min(1 + sum(value.weight for value in taken), _MAX_WEIGHT)
    depth = 1 + max((value.depth for value in taken), default=-1)
    if not opcode.stack_after:
        return []
    if name in _IN_PLACE:
        taken[0].weight = weight - 1
        return [taken[0]]
    if name in ("GLOBAL", "STACK_GLOBAL"):
        parts = str(argument).split(" ", 1) if name == "GLOBAL" else [str(value.text) for value in taken]
        found = _global_name(*parts)
        if _ACTING.match(found):
            raise _Acting(f"{found}, which acts when it is rebuilt")
        return [_Value(name=found, is_global=True)]
    if name in _CALLS:
        if name in ("OBJ", "INST"):
            raise _Costly(f"the instruction {name}")
        _check_call(taken[0], taken[1].items)
        return [_Value(weight, depth, taken[0].name)]
    if name.startswith("TUPLE") and depth > _MAX_DEPTH:
        raise _Costly("tuples within tuples without end")
    items = tuple(taken) if name.startswith("TUPLE") else ()
    return [_Value(weight, depth, items=items)]


def _global_name(module: str, name: str) -> str:
    """By which it is known to Python 3."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _check_call(called: _Value, arguments: Sequence[_Value]) -> None:
    if called.name == _REBUILD_FROM_TYPE and len(arguments) > 2:
        _check_call(arguments[0], arguments[2].items)
    made = [value for value in arguments if value.is_global or "." in value.name]
    allowed = {
        _ENCODE: len(arguments) == 2 and arguments[1].text == "latin1",
        "builtins.bytearray": all(value.text is not None or value.name == _ENCODE for value in arguments),
        "builtins.bytes": not arguments,
        **dict.fromkeys(_CONTAINERS, not made),  # a tensor may look like one of any length
    }
    if not allowed.get(called.name, _ALLOCATING.fullmatch(called.name) is None):
        raise _Costly(f"a call of {called.name} that no state needs")


def unpickling_error(where: str, error: Exception) -> DamagedError:
    """The error of a pickle that was not loaded."""
    if isinstance(error, _Costly):
        return DamagedError(f"{where}: takes memory or time out of proportion: {error}; use another checkpoint")
    if isinstance(error, _Acting):
        return DamagedError(f"{where}: it holds {error}; use another checkpoint")
    return DamagedError(
        f"{where}: refused by the weights-only unpickler, which runs no code; if its types are yours, register them "
        "with torch.serialization.add_safe_globals"
    )


def unpickled(data: bytes, where: str) -> Any:
    """An object, from what ``torch.save`` made of it.

    Raises:
        DamagedError: It would run code, or take time or memory out of proportion.
    """
    try:
        return load_state(data)
    except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
        raise unpickling_error(where, error) from error


def check_loadable(data: bytes, what: str) -> None:
    """Refuse, before it is stored, an object that no load would accept.

    Args:
        data: What ``torch.save`` made of it.
        what: Names the object in errors.

    Raises:
        ConfigurationError: It would run code, act, or take time or memory out of proportion.
    """
    try:
        load_state(data)
    except (_Costly, _Acting) as error:
        raise ConfigurationError(
            f"{what}: a load would refuse it, because it holds {error}; store plain values and tensors instead"
        ) from error
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            f"{what} could not be loaded again without running code; store plain values and tensors, or register its "
            "types with torch.serialization.add_safe_globals"
        ) from error


def serialized(value: Any, where: str) -> io.BytesIO:
    """An object as DCP hands it to planners, which unpickle it without any check.

    Raises:
        DamagedError: It cannot be pickled again, because it is nested too deeply.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # torch may find anything wrong with a tensor that somebody made up
        raise DamagedError(f"{where}: it cannot be handed on ({error}); use another checkpoint") from error
    stream.seek(0)
    return stream
