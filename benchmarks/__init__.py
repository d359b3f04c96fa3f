"""Benchmarks, which measure the project's figures. ``python -m benchmarks --help`` describes how to run them.

Each module in a folder of ``runners`` is one benchmark: its ``run`` takes a ``Setup`` and returns a ``Report``. A
figure is a ratio of values that are measured alternately in one run, because absolute times depend more on the machine
than on the code.

- ``__main__``: the command line.
- ``runners``: the benchmarks.
- ``plots``: plots of their figures.
- ``support``: code that the benchmarks share.
"""
