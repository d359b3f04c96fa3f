"""Checks of untrusted pickles before they are loaded: the functions that they call, and the memory and time they take.

Even an unpickler that runs no code can be made to use unlimited memory or time. An archive may decompress to a thousand
times its size. A call may allocate as many bytes as a number says, and tuples of tuples may be hashed again and again.
So this module interprets the instructions of a pickle one by one, with a short description instead of each value. It
then builds a new archive from the files that it has checked, and torch loads this archive.
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

ARCHIVE_BEGIN = b"PK\x03\x04"  # the first bytes of a file of torch.save
# Its last bytes: the 64-bit record of the central directory, with size and offset; its locator; and the 32-bit record.
_ARCHIVE_END = struct.Struct("<4s36x2Q4s4xQ4x4s18x")
_END_MARKS = (b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06")
_MAX_DEPTH = 500  # of nested tuples; hashing a deeper one may overflow the stack
_FREE_WORK = 1 << 24  # values that a pickle of any size may hash
_WORK_PER_BYTE = 16  # further values that it may hash, per byte
_MAX_WEIGHT = 1 << 62  # weights are capped here, far above every limit
_MAX_TENSOR_WEIGHT = 1 << 20  # bytes of a tensor's pickle, without the values of the tensor
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST")
_IN_PLACE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_ENCODE = "_codecs.encode"  # pickles of protocol 2 contain bytes as calls of it
_REBUILD_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Types with side effects when they are rebuilt: a DeviceMesh starts torch.distributed. The excepted ones have none.
_ACTING = re.compile(r"torch\.distributed\.(?!tensor\.placement_types\.|checkpoint\.(metadata|filesystem)\.)")
# These allocate as much as a number says, or reinterpret tensors. No state dict needs to call them.
_ALLOCATING = re.compile(r"torch\.(?!distributed\.)(\w+\.)*(\w*(Tensor|Storage)|_rebuild_device_tensor_\w+)")
_CONTAINERS = {"builtins.set", "builtins.frozenset", "collections.Counter", "collections.OrderedDict", "torch.Size"}


class _Costly(Exception):
    """A pickle would take too much memory or time for its size."""


class _Acting(Exception):
    """A pickle contains a type that has side effects when it is rebuilt."""


@dataclass(eq=False, slots=True)
class _Value:
    """A description of a value of the pickle, used instead of the value.

    Attributes:
        weight: Number of values that it contains; a value that it contains twice counts twice.
        depth: Nesting depth of these values.
        name: Full name of a global; for other values, the full name of the global whose call created it.
        is_global: Whether it is a global.
        text: The string, if it is one.
        items: The items, if it is a tuple.
    """

    weight: int = 1
    depth: int = 0
    name: str = ""
    is_global: bool = False
    text: str | None = None
    items: tuple["_Value", ...] = ()


def load_state(data: bytes) -> Any:
    """Load an object that ``torch.save`` wrote, without running code, in time and memory bounded by its size.

    Raises:
        Exception: Of any type, if ``data`` is something else, or needs types that are not registered.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > len(data):
            raise _Costly("an archive that is larger when decompressed")
        contents = {entry.filename: archive.read(entry) for entry in entries if _is_stored(entry)}
    if len({name.lower() for name in contents}) != len(entries):  # torch ignores the case of names
        raise _Costly("an archive with compressed or repeated files")
    for name, content in contents.items():
        if _is_pickle(name):
            check_pickle(content)
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(rebuilt, "w") as archive:  # torch might read other files than zipfile from the same bytes
        for name, content in contents.items():
            archive.writestr(name, content)
    rebuilt.seek(0)
    return torch.load(rebuilt, weights_only=True)


def check_archive(file: IO[bytes] | io.RawIOBase) -> None:
    """Check the pickle of one tensor, in an archive that is too large to be read as a whole.

    Raises:
        Exception: Of any type, if it would take too much time or memory for its size, or is not such an archive.
    """
    _check_layout(file)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not _is_stored(entry):
                raise _Costly("an archive with compressed files")
            if _is_pickle(entry.filename):
                if entry.file_size > _MAX_TENSOR_WEIGHT:
                    raise _Costly(f"a pickle of {entry.file_size} bytes, expected at most {_MAX_TENSOR_WEIGHT}")
                check_pickle(archive.read(entry))


def _check_layout(file: IO[bytes] | io.RawIOBase) -> None:
    """Raise an error if an archive does not begin and end as torch writes it.

    From other archives, zipfile and torch may read different files. torch treats a file that begins otherwise as a bare
    pickle. If the offset of the central directory is wrong, for example because of bytes before the archive, zipfile
    corrects it, and torch does not.
    """
    file.seek(0)
    begin = file.read(len(ARCHIVE_BEGIN))
    end_offset = max(0, file.seek(0, os.SEEK_END) - _ARCHIVE_END.size)
    file.seek(end_offset)
    end = file.read(_ARCHIVE_END.size) or b""
    if len(end) == _ARCHIVE_END.size and begin == ARCHIVE_BEGIN:
        record, num_bytes, start, locator, record_offset, last = _ARCHIVE_END.unpack(end)
        if (record, locator, last) == _END_MARKS and record_offset == start + num_bytes == end_offset:
            return
    raise _Costly("an archive whose layout is not that of torch.save")


def _is_pickle(name: str) -> bool:
    """Return whether torch may read a file in an archive as a pickle. It ignores the case of names."""
    return name.lower().endswith(".pkl")


def _is_stored(entry: zipfile.ZipInfo) -> bool:
    """Return whether a file in an archive is not compressed, as ``torch.save`` writes it."""
    return entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size


def check_pickle(data: bytes) -> None:
    """Raise an error if a pickle would take too much time or memory for its size.

    Raises:
        Exception: Of any type, if it would, or is not a pickle.
    """
    stack: list[_Value | None] = []  # None represents a mark
    memo: dict[int, _Value] = {}
    work = 0
    argument: Any
    for instruction_number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name in _PUTS:
            index = len(memo) if argument is None else argument
            if index > instruction_number:
                raise _Costly(f"a memo index of {index}, more than its instructions")
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
            operands = _taken(stack, opcode)
            work += _hashed(name, operands)
            if work > _FREE_WORK + _WORK_PER_BYTE * len(data):
                raise _Costly("nested tuples that are hashed again and again")
            stack += _given(opcode, argument, operands)


def _top(stack: Sequence[_Value | None]) -> _Value:
    top = stack[-1]
    if top is None:
        raise _Costly("a mark that is used as a value")
    return top


def _taken(stack: list[_Value | None], opcode: pickletools.OpcodeInfo) -> list[_Value]:
    """Take the values that an instruction uses off the stack."""
    operands: list[_Value] = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while (value := stack.pop()) is not None:
                operands.append(value)
        elif kind is not pickletools.markobject:
            operands.append(_top(stack))
            stack.pop()
    return operands[::-1]


def _hashed(name: str, operands: Sequence[_Value]) -> int:
    """Return how many values an instruction may hash, of those that it uses."""
    if name in ("SETITEM", "SETITEMS"):
        return sum(value.weight for value in operands[1::2])
    return sum(value.weight for value in operands) if name in ("ADDITEMS", "FROZENSET", *_CALLS) else 0


def _given(opcode: pickletools.OpcodeInfo, argument: object, operands: Sequence[_Value]) -> list[_Value]:
    """Return the values that an instruction puts onto the stack."""
    name = opcode.name
    weight = min(1 + sum(value.weight for value in operands), _MAX_WEIGHT)
    depth = 1 + max((value.depth for value in operands), default=-1)
    if not opcode.stack_after:
        return []
    if name in _IN_PLACE:
        operands[0].weight = weight - 1
        return [operands[0]]
    if name in ("GLOBAL", "STACK_GLOBAL"):
        name_parts = str(argument).split(" ", 1) if name == "GLOBAL" else [str(value.text) for value in operands]
        global_name = _global_name(*name_parts)
        if _ACTING.match(global_name):
            raise _Acting(f"{global_name}, which has side effects when it is rebuilt")
        return [_Value(name=global_name, is_global=True)]
    if name in _CALLS:
        if name in ("OBJ", "INST"):
            raise _Costly(f"the instruction {name}")
        _check_call(operands[0], operands[1].items)
        return [_Value(weight, depth, operands[0].name)]
    if name.startswith("TUPLE") and depth > _MAX_DEPTH:
        raise _Costly(f"tuples nested more than {_MAX_DEPTH} levels deep")
    items = tuple(operands) if name.startswith("TUPLE") else ()
    return [_Value(weight, depth, items=items)]


def _global_name(module: str, name: str) -> str:
    """Return the full name in Python 3 of a global that a pickle may give by its name in Python 2."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _check_call(called: _Value, arguments: Sequence[_Value]) -> None:
    if called.name == _REBUILD_FROM_TYPE and len(arguments) > 2:
        _check_call(arguments[0], arguments[2].items)
    constructed = [value for value in arguments if value.is_global or "." in value.name]
    allowed = {
        _ENCODE: len(arguments) == 2 and arguments[1].text == "latin1",
        "builtins.bytearray": all(value.text is not None or value.name == _ENCODE for value in arguments),
        "builtins.bytes": not arguments,
        **dict.fromkeys(_CONTAINERS, not constructed),  # iterating a tensor may yield any number of values
    }
    if not allowed.get(called.name, _ALLOCATING.fullmatch(called.name) is None):
        raise _Costly(f"a call of {called.name} that no state dict needs")


def unpickling_error(where: str, error: Exception) -> DamagedError:
    """Return the error for a pickle that was not loaded because of ``error``."""
    if isinstance(error, _Costly):
        return DamagedError(f"{where}: it could take too much memory or time: it holds {error}; use another checkpoint")
    if isinstance(error, _Acting):
        return DamagedError(f"{where}: it holds {error}; use another checkpoint")
    return DamagedError(
        f"{where}: refused by the weights-only unpickler, which runs no code; if its types are yours, register them "
        "with torch.serialization.add_safe_globals"
    )


def unpickled(data: bytes, where: str) -> Any:
    """Load an object from the bytes that ``torch.save`` wrote.

    Raises:
        DamagedError: The object would run code, or take too much time or memory for its size.
    """
    try:
        return load_state(data)
    except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
        raise unpickling_error(where, error) from error


def check_loadable(data: bytes, what: str) -> None:
    """Raise an error before an object is stored that no load would accept.

    Args:
        data: The bytes that ``torch.save`` wrote.
        what: The name of the object, for errors.

    Raises:
        ConfigurationError: The object would run code, have side effects, or take too much time or memory for its size.
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
    """Return an object as the stream that DCP passes to planners, which unpickle it without any check.

    Raises:
        DamagedError: The object cannot be pickled again, for example because it is nested too deeply.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # torch may raise anything for a forged tensor
        raise DamagedError(f"{where}: it cannot be pickled again ({error}); use another checkpoint") from error
    stream.seek(0)
    return stream
