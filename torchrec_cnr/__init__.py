"""Incremental, quantized checkpoints of TorchRec models, through the stock ``torch.distributed.checkpoint``.

A package or module in this list imports only from those below it, never from those above. ``saving`` and ``loading`` do
not import each other, nor do ``manager`` and ``serving``, nor ``maintenance`` and ``sizing``, nor ``lineage`` and
``kafka``. A package that needs something from further up gets it as an argument.

- ``cli/``: the command line ``cnr``. Nothing in the library imports it.
- ``testing/``: checks whether a file system can hold checkpoints, and a file system that injects faults for tests.
- ``__init__``: the public names, which ``__init__.pyi`` lists with their modules. Each is imported on first use:
  reading a checkpoint does not import TorchRec, and the command line shows its help without importing torch.
- ``manager/``: ``CheckpointManager``, one object that saves, restores, compacts and prunes the checkpoints of a run.
- ``serving/``: ``RowSubscriber``, which updates a live model with each checkpoint that a job commits.
- ``maintenance/``: operations on committed checkpoints: compact, prune, verify, compare, export, import.
- ``sizing/``: estimates bytes, bandwidth, disk and memory of a model's checkpoints before there are any.
- ``saving/``: the plug-ins for ``dcp.save`` and ``dcp.async_save``, which decide, copy, encode, write and commit.
- ``loading/``: the plug-ins for ``dcp.load``, which match a checkpoint to a state dict and read the local shards.
- ``reading/``: merges the checkpoints of a chain into tensors, without DCP.
- ``tracking/``: ``RowTracker``, which records the rows of embedding tables that training modifies.
- ``lineage/``: committed checkpoints, the chain from a checkpoint back to its baseline, and the latest one of a root.
- ``kafka/``: rows of deltas in a Kafka topic, and commits by a commit record in another topic.
- ``storage/``: directories in any fsspec file system: reads, writes, retries, data files, leases and fences.
- ``policies``: the policies, which decide which earlier checkpoint each delta is based on.
- ``sharding``: which shards of a tensor this rank holds. The only module that knows ``ShardedTensor`` and ``DTensor``.
- ``format/``: the checkpoint format of docs/reference/format.md as values, with its validation. It does no I/O.
- ``quantization/``: the quantization schemes, which turn rows into bytes and back, and the rules that choose among
  them.
- ``kernels/``: compiled code that encodes and decodes rows, on CPUs (numba) and GPUs (Triton). Knows no checkpoints.
- ``telemetry``: metrics and spans by OpenTelemetry's API, if it is installed.
- ``progress``: progress callbacks, and the time and bytes that a save spent in each phase.
- ``throttling``: limits on the share of a core and on the bandwidth that background work uses.
- ``gc_pause``: pauses Python's garbage collector while plans and manifests with many shards are built.
- ``arguments``: checks of arguments, whose errors name the argument.
- ``human_text``: formats sizes, counts, times and names for people.
- ``dependencies``: the versions of PyTorch, TorchRec and FBGEMM that belong together.
- ``errors``: every exception that the library raises on purpose.
- ``version``: the version of the package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
