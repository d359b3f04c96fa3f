"""Benchmarks: where the project's figures come from. ``python -m benchmarks --help`` tells how to run them.

Each module in a folder of ``runners`` is one benchmark: its ``run`` takes a ``Setup`` and returns a ``Report``. A
figure is a ratio of things measured in one run, in turns, because absolute times say more about the machine than about
the code.

- ``__main__``: the command line.
- ``runners``: the benchmarks.
- ``plots``: plots of their figures.
- ``support``: what they share.
"""
