"""PyTorch's own tests of DCP, with our classes in place of the stock ones: ``python -m tests.dcp_suite``.

- ``__main__``: gets the tests, runs them, and compares what fails with what is refused by design.
- ``substitutes``: imported first by each file of tests: puts our classes in place of the stock ones.
"""
