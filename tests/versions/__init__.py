"""The versions of PyTorch, TorchRec and FBGEMM that are supported, each tested in an environment of its own.

``python -m tests.versions`` makes the environments, runs the quick tests and the whole matrix of models in each, loads
what each version saved in all others, and writes the page of compatibility. An environment takes 6 GB.

- ``__main__``: does this, and writes ``docs/reference/versions.json``.
- ``environments``: the pairs of versions, and how their environments are made.
- ``exchange``: a program that saves checkpoints in one environment, and loads those of others.
- ``page``: writes the tables of ``docs/reference/compatibility.md`` from what was measured.
"""
