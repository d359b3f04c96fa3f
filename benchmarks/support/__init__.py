"""What benchmarks share.

- ``confidence_intervals``: means over seeds, and how far they can be trusted.
- ``process_memory``: resident memory now and at its peak.
- ``processes``: a benchmark in a process of its own.
- ``registry``: the benchmarks, found in the folder of runners.
- ``report``: what a benchmark returns, and how it is printed.
- ``quantization_errors``: the error of every scheme against the bytes that a row takes, measured and as tables.
- ``residuals``: rows stored as differences from the checkpoint before.
- ``rounds``: candidates timed in turns, and the setup that each benchmark gets.
- ``servers``: a Kafka broker and an S3 bucket, named or started.
- ``data``: clicks, models that learn from them, and rows to quantize.
- ``jobs``: training jobs and the saves that are measured.
"""
