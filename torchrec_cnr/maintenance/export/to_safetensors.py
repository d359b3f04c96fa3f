"""Exports to safetensors: writes the header of each file, and then the rows of its tensors as they are read.

The result is one file, or several with an index for Hugging Face's libraries. Safetensors files cannot contain objects,
so these are written to a JSON file, if JSON can represent them.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.maintenance.export.contents import Contents, bytes_of
from torchrec_cnr.maintenance.export.destination import Written, new_directory
from torchrec_cnr.storage.pack_writer import SAFETENSORS, safetensors_header
from torchrec_cnr.storage.store import Store

FILE_BYTES = 4 << 30  # of tensors in a file; a larger tensor gets a file of its own
_INDEX = "model.safetensors.index.json"
_OBJECTS = "objects.json"
_RESERVED = "__metadata__"


def write_safetensors(contents: Contents, out: str | os.PathLike[str]) -> Written:
    """Write a directory with ``model.safetensors``, or with several files and their index, which is written last.

    Raises:
        ConfigurationError: A tensor has a name that is reserved in safetensors files.
    """
    if _RESERVED in contents.tensors:
        raise ConfigurationError(
            f"a tensor has the name {_RESERVED!r}, which is reserved in safetensors files; export to 'dcp'"
        )
    objects = contents.objects()
    json_objects = {fqn: value for fqn, value in sorted(objects.items()) if _is_json(value)}
    files = _plan_files(contents)
    with new_directory(out) as store:
        if json_objects:
            store.put(_OBJECTS, [json.dumps(json_objects, indent=1).encode()])
        for name, fqns in files.items():
            _write_file(store, name, fqns, contents)
        if len(files) > 1:
            store.put(_INDEX, [_index(files, contents)])
        return store, tuple(store.names()), tuple(sorted(set(objects) - set(json_objects)))


def _plan_files(contents: Contents) -> dict[str, list[str]]:
    """Return the FQNs of the tensors in each file. Those with larger elements come first, so that all are aligned."""
    files: list[list[str]] = [[]]
    left_bytes = FILE_BYTES
    for fqn, tensor in sorted(contents.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if tensor.num_bytes > left_bytes and files[-1]:
            files.append([])
            left_bytes = FILE_BYTES
        files[-1].append(fqn)
        left_bytes -= tensor.num_bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": fqns for number, fqns in enumerate(files, start=1)}


def _write_file(store: Store, name: str, fqns: list[str], contents: Contents) -> None:
    tensors = [contents.tensors[fqn] for fqn in fqns]
    entries = (
        (tensor.fqn, SAFETENSORS[str(tensor.dtype).removeprefix("torch.")], tensor.box.sizes, tensor.num_bytes)
        for tensor in tensors
    )
    with store.create(name) as stream:
        stream.write(safetensors_header(entries, {"format": "pt"}))
        for _, values in contents.read(fqns):
            stream.write(bytes_of(values).data)


def _index(files: Mapping[str, list[str]], contents: Contents) -> bytes:
    weight_map = {fqn: name for name, fqns in files.items() for fqn in fqns}
    return json.dumps({"metadata": {"total_size": contents.num_bytes}, "weight_map": weight_map}, indent=1).encode()


def _is_json(value: Any) -> bool:
    """Return whether JSON can represent a value without loss, except that tuples become lists."""
    if type(value) in (list, tuple):
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
