# Two commands on a fresh machine that has python3 and make: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
ROUNDS ?= 10
# For one process, and again for two.
KILLS ?= 100
# Of data workers, of ranks and of the parent, under each launcher.
LAUNCHED_KILLS ?= 5
# Tests at a time; most slow ones start two processes of their own.
JOBS ?= 2
# A worker that runs out of tests takes half of another's, so none ends long after the others.
PYTEST := -m pytest -n $(JOBS) --dist worksteal

# Without compiled modules every process compiles runnerkit and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all coverage parity screenshots bench bench-peers drills docs lint check format clean

help:  ## print this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/demo  ## train a small CNN on real images with ddp=True, amp=True; leave logs, checkpoints, curves
	$(BIN)/python examples/demo.py

test: $(VENV)/test  ## run the tests that are not marked slow, and the examples in docstrings (10 minutes)
	$(BIN)/python $(PYTEST) -m "not slow"
	$(BIN)/python -m pytest --doctest-modules runnerkit

test-slow: $(VENV)/installed  ## run the tests that are marked slow: launchers, examples, notebooks, kills, wheels
	$(BIN)/python $(PYTEST) -m slow

test-all: test test-slow  ## run all tests (25 minutes)

coverage: $(VENV)/installed  ## measure the lines and branches that all tests reach, processes included
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

parity: $(VENV)/installed  ## write the table of engines and launchers in docs/engines.md from a test run
	RUNNERKIT_WRITE_PARITY_TABLE=1 $(BIN)/python -m pytest tests/engines/test_parity_law.py -k gives

screenshots: $(VENV)/installed  ## take docs/images/tensorboard.png anew; needs Debian's chromium
	RUNNERKIT_WRITE_SCREENSHOTS=1 $(BIN)/python -m pytest tests/loggers/test_tensorboard_in_browser.py

bench: $(VENV)/installed  ## measure runnerkit beside raw PyTorch; write benchmarks/RESULTS.md (ROUNDS=10)
	$(BIN)/python -m benchmarks --rounds $(ROUNDS)

bench-peers: $(VENV)/installed $(PEERS)/installed  ## the same with eight other frameworks, in an environment of their own
	$(BIN)/python -m benchmarks --rounds $(ROUNDS) --peers $(PEERS)/bin/python

drills: $(VENV)/installed  ## kill runs and resume them, 245 times; write the tables in docs/reliability.md (KILLS=100)
	$(BIN)/python -m tests.faults.drill --kills $(KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.launched_drill --kills $(LAUNCHED_KILLS) --page docs/reliability.md

docs: $(VENV)/installed  ## build the site of docs/ into site/, which any browser shows offline; a broken link ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/installed  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/imagenet/*.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python

check: lint test-all  ## check format, lint and types, then run all tests

format: $(VENV)/installed  ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What the demo needs; what the tests that are not slow need too; what development needs too.
$(VENV)/demo: EXTRA := demo
$(VENV)/test: EXTRA := test
$(VENV)/installed: EXTRA := dev
$(VENV)/demo $(VENV)/test $(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA)]'
	touch $@

$(PEERS)/installed: benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/peers/requirements.txt
	touch $@

clean:  ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) .venv-dev $(PEERS) .coverage* horovod.log build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis site
