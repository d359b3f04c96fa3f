"""The benchmarks, in a folder for each subject.

A file's name, without a trailing underscore, is the benchmark's name on the command line: ``async_`` has one because
``async`` is a keyword. Each module ends with its ``BENCHMARK``, which the registry finds.

- ``gpu``: kernels, saves, marking and loads on a CUDA device.
- ``loading``: reads of tables and ranges, integrity, serving.
- ``maintenance``: compaction, and bytes over a run by policy.
- ``quantization``: errors, speed and accuracy.
- ``saving``: bytes, time, memory and stalls of saves.
- ``storage``: Kafka and S3.
- ``tracking``: modified rows, and the cost of tracking them.
"""
