# Two commands do everything on a fresh machine: `make train` and `make test`.
# Tests run in JOBS processes: three more than there are cores, because many tests wait for others.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=
EIGHTH ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 3 + (os.cpu_count() or 1)))')
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Hundreds of processes start in the tests: each would compile the package anew where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help

.PHONY: help setup train test test-all quick simulate chaos check format bench bench-quick docs dist release clean

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/installed ## Make the environment in .venv (pinned versions)

# torch first and by itself: the other packages are content with whatever build of it is there.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "making the environment in $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q src
	@touch $@

train: setup ## Train a small GPT on real text through 2 workers and 2 servers; ARGS="--data FOLDER" for your own
	@$(BIN)/rallypoint train --workers 2 --servers 2 gpt $(ARGS)

test: setup ## Run the tests, in a few minutes; ARGS="-k name" for some of them, JOBS=1 for one after another
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup ## Run all tests, with the long plays and every variant; EIGHTH=0, ... or 7 for an eighth of those, as in CI
	EIGHTH=$(EIGHTH) $(PYTEST) $(ARGS)

quick: setup ## Run the tests that start no whole programs
	$(PYTEST) -m "not slow and not programs" $(ARGS)

simulate: setup ## Play SEEDS=1000 seeded plans of faults on a simulated cluster
	$(BIN)/python -m rallypoint.testing.simulation --seeds $(or $(SEEDS),1000)

chaos: setup ## Kill 40 processes under a training run: the same bytes?
	@$(BIN)/rallypoint chaos --kills 40 --resizes 4,1,3 --everything gpt --steps 1200 --validate-every 600 $(ARGS)

check: setup ## Lint, types, import directions, sizes, names, the length of the road
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py tests/test_house.py tests/test_hot_path.py

format: setup ## Sort imports, fix what ruff can fix
	$(BIN)/ruff check --fix .

bench: setup ## Run the benchmarks one after another (root: they use network namespaces)
	$(BIN)/python benchmarks/reduce.py --goals --json benchmarks/reduce.json
	$(BIN)/python benchmarks/racks.py --json benchmarks/racks.json
	$(BIN)/python benchmarks/train.py --goals --json benchmarks/train.json
	$(BIN)/python benchmarks/recovery.py --json benchmarks/recovery.json

bench-quick: setup ## The ratios that must not get worse, beside those kept last (6 minutes, nothing else running)
	@$(BIN)/python benchmarks/quick.py $(ARGS)

docs: setup ## Build the site in docs/_build/html; a warning is an error, and so is a link to nowhere
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

dist: setup ## Build the wheel and the source distribution in dist/
	@rm -rf dist
	@$(BIN)/python -m build $(ARGS)

release: setup ## Build and check all of a release (a dry run); TAG=1 makes the tag if nothing is missing
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs,release]'
	@$(BIN)/python .ci/release.py $(if $(TAG),--tag) $(ARGS)

clean: ## Remove the environment and caches, not the runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build docs/reference
