"""Benchmarks: where the project's figures come from. ``python -m benchmarks --help`` tells how to run them.

Every module but those below is one benchmark: ``run`` takes a ``Setup`` and gives a ``Report``. A figure is a ratio
of things measured in one run, in turns, because absolute times say more about the machine than about the code.

    report.py   what a benchmark gives, and how it is printed
    rounds.py   candidates timed in turns
    models.py   TorchRec tables, sharded and trained as in a job
    process.py  a benchmark in a process of its own
    rows.py     rows to quantize, drawn and trained

``quantization_plot`` is a program of its own: it draws the plot of docs/quantization.md and prints its tables.
"""
