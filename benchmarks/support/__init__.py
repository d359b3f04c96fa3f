"""Code that the benchmarks share.

- ``confidence_intervals``: means over seeds, with their confidence intervals.
- ``devices``: the device that benchmarks for GPUs use.
- ``limited_store``: a store of limited speed.
- ``process_memory``: resident memory now and at its peak.
- ``processes``: runs a benchmark in another process, and jobs on several ranks.
- ``registry``: finds the benchmarks in the folder of runners.
- ``report``: the result of a benchmark, and its text.
- ``quantization_errors``: measures the error of every scheme by its bytes per row, and formats tables.
- ``residuals``: rows stored as differences from the checkpoint before.
- ``rounds``: times candidates alternately, and defines the setup of benchmarks.
- ``servers``: a Kafka broker and an S3 bucket, given on the command line or started.
- ``slow_store``: a store with a latency for each request, whose bandwidth several processes share.
- ``transformed_rows``: rows that are transform-coded at each checkpoint.
- ``data``: clicks, models that learn from them, and rows to quantize.
- ``jobs``: training jobs and the saves that are measured.
"""
