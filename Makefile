# Every target makes .venv first when it is missing or older than what it is made from: python3.11 and make are enough.

SHELL := /bin/sh
.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON := python3.11
BIN := .venv/bin
# Written last: a .venv without it was left half built, and is built anew.
STAMP := .venv/.complete
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
TYPED := $(wildcard torchrec_cnr examples benchmarks)

.PHONY: help .venv demo check test lint types quick unit test-full test-versions test-dcp bench bench-full gpu docs clean

help: ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target text; do printf '  make %-10s %s\n' "$$target" "$$text"; done

.venv: $(STAMP) ## the virtual environment that everything below runs in

$(STAMP): requirements/cpu.txt requirements/cpu-nodeps.txt pyproject.toml
	@echo "making .venv with $(PYTHON) from requirements/ (once; needs a minute or two)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	$(PIP_INSTALL) --no-compile -r requirements/cpu.txt
	$(PIP_INSTALL) --no-compile --no-deps -r requirements/cpu-nodeps.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@# On all cores, which pip does not use. It fails for the files of other versions of Python that some packages have.
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: .venv ## run the demonstration
	$(BIN)/python examples/demo.py

check: lint ## for the inner loop: lint, types and the quick tests of all packages, in about three minutes
	$(BIN)/mypy $(TYPED) & $(MAKE) --no-print-directory quick && wait $$!

test: lint ## what every change must pass: lint, types, and all tests but the slow ones
	$(BIN)/mypy $(TYPED) & $(MAKE) --no-print-directory unit && wait $$!

lint: .venv ## rules and layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv ## static types
	$(BIN)/mypy $(TYPED)

quick: .venv ## the tests that take less than half a second each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not long" --numprocesses 2 --dist loadfile

unit: .venv ## tests, but the slow ones; four files at a time, as many wait for servers, those that take long first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses 4 --dist loadfile --no-loadscope-reorder

test-full: .venv ## all tests, the slow ones too; takes hours
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile full --numprocesses 2 --dist load

test-versions: ## the supported versions of PyTorch, each in an environment of 6 GB; takes an hour or more
	$(PYTHON) -m tests.versions

test-dcp: .venv ## PyTorch's own tests of DCP, with our classes in place of its own; 27 MB are downloaded
	$(BIN)/python -m tests.dcp_suite

bench: .venv ## run the benchmarks that take minutes
	$(BIN)/python -m benchmarks --plots build/plots --json build/figures.json

bench-full: .venv ## run all benchmarks; takes more than an hour
	$(BIN)/python -m benchmarks --full --plots build/plots --json build/figures.json

gpu: ## on a machine with CUDA and with the environment of `make gpu PYTHON=...`: tests and benchmarks that need a GPU
	$(PYTHON) -m pytest -m gpu --numprocesses 4
	$(PYTHON) -m benchmarks gpu-kernels gpu-stall gpu-marking gpu-loads --json build/gpu.json

docs: .venv ## build the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

clean: ## remove all that was made here, .venv too
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
