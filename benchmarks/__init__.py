"""Benchmarks: where the project's figures come from. ``python -m benchmarks --help`` tells how to run them.

Every module but the four below is one benchmark: ``run`` takes a ``Setup`` and gives a ``Report``. A figure is a ratio
of things measured in one run, in turns, because absolute times say more about the machine than about the code.

    report.py   what a benchmark gives, and how it is printed
    rounds.py   candidates timed in turns
    models.py   TorchRec tables, sharded and trained as in a job
    process.py  a benchmark in a process of its own
"""
