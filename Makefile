# On a fresh machine with python3 and make, start with `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# Versions of what is installed for development: those that the tests passed with, or, of constraints.txt, the newest.
LOCK ?= constraints-dev.txt
BIN := $(VENV)/bin
PEERS := .venv-peers
ROUNDS ?= 10
# Kills per drill of one process, and of two processes.
KILLS ?= 100
# The same, for each of six sources of streams.
STREAM_KILLS ?= 10
# The same, for a sharded model in four processes.
MESH_KILLS ?= 20
# Kills and faults of runs in a store, each for one process and for two.
STORE_KILLS ?= 50
STORE_FAULTS ?= 50
# Kills of runs in a store, for each of six sources of streams.
STREAM_STORE_KILLS ?= 5
# Kills of data workers, of ranks and of the parent process, for each launcher.
LAUNCHED_KILLS ?= 5
# Random runs of each fuzzer.
CASES ?= 500
# Pythons for smoke runs with the newest torch, by name or path.
PYTHONS ?= python3.12 python3.13 python3.14
# Of `make gpu`: cuda, or cpu for a dry run at tiny sizes; path of its report, without a suffix.
DEVICE ?= cuda
GPU_REPORT ?= gpu_report
# Parallel test workers; tests wait for processes about half of their time, and most slow ones start two more.
JOBS ?= 4
# An idle worker takes half of another's remaining tests, so that all finish at about the same time.
PYTEST := -m pytest -n $(JOBS) --dist worksteal

# Without cached bytecode, every process compiles runnerkit and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-doctests test-slow test-all test-versions coverage parity screenshots bench bench-peers gpu drills fuzz docs lint check format lock clean

help:  ## print this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/demo  ## train a small CNN on real images with ddp=True, amp=True; write logs, checkpoints and curves
	$(BIN)/python examples/demo.py

test: test-quick test-doctests  ## run the tests not marked slow and the docstring examples (10 minutes)

test-quick: $(VENV)/test
	$(BIN)/python $(PYTEST) -m "not slow"

test-doctests: $(VENV)/test
	$(BIN)/python -m pytest --doctest-modules runnerkit

test-slow: $(VENV)/installed  ## run the tests marked slow: launchers, examples, notebooks, kills, wheels
	$(BIN)/python $(PYTEST) -m slow

test-all: test test-slow  ## run all tests (25 minutes)

test-versions:  ## run the quick tests with the oldest and the newest torch, smoke runs with PYTHONS; downloads 7 GB for each
	JOBS=$(JOBS) scripts/test_versions.sh $(PYTHON) $(PYTHONS)

coverage: $(VENV)/installed  ## measure line and branch coverage of all tests, including child processes
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

parity: $(VENV)/installed  ## run the parity tests and write the table of engines and launchers in docs/engines.md
	RUNNERKIT_WRITE_PARITY_TABLE=1 $(BIN)/python -m pytest tests/engines/test_parity_law.py tests/engines/test_gradient_law.py \
		tests/engines/test_tensor_parallel.py -k "gives or is_that_of_one"

screenshots: $(VENV)/installed  ## update the pictures of TensorBoard, watch and report in docs/images; requires Debian's chromium
	RUNNERKIT_WRITE_SCREENSHOTS=1 $(BIN)/python -m pytest tests/loggers/test_tensorboard_in_browser.py
	rm -rf logs/batch_size=64
	$(BIN)/python examples/demo.py --limit 6000 --epochs 8 --logdir logs/batch_size=64
	$(BIN)/python scripts/pictures.py logs/batch_size=64

bench: $(VENV)/installed  ## benchmark runnerkit and raw PyTorch; write RESULTS.md and the README's table (ROUNDS=10)
	$(BIN)/python -m benchmarks --rounds $(ROUNDS)
	$(BIN)/python -m benchmarks.readme_table

bench-peers: $(VENV)/installed $(PEERS)/installed  ## also benchmark eight other frameworks, in a separate environment
	$(BIN)/python -m benchmarks --rounds $(ROUNDS) --peers $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.readme_table

# Installs nothing: a machine with a GPU may lack a network, and its packages belong to its torch.
gpu:  ## check numbers, speed and memory on a GPU, in 9 minutes, with the installed packages (DEVICE=cpu: dry run)
	$(PYTHON) -m benchmarks.on_gpu --device $(DEVICE) --report $(GPU_REPORT)

drills: $(VENV)/installed  ## kill and resume runs 590 times; write the tables in docs/reliability.md (KILLS=100)
	$(BIN)/python -m tests.faults.drill --kills $(KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.drill --streams --kills $(STREAM_KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.drill --mesh --kills $(MESH_KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.store_drill --kills $(STORE_KILLS) --faults $(STORE_FAULTS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.store_drill --streams --kills $(STREAM_STORE_KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.launched_drill --kills $(LAUNCHED_KILLS) --page docs/reliability.md
	$(BIN)/python -m tests.faults.launched_drill --store --kills $(LAUNCHED_KILLS) --page docs/reliability.md

fuzz: $(VENV)/installed  ## compare random runs with hand-written loops, and interrupted ones with whole ones (CASES=500)
	$(BIN)/python -m tests.faults.fuzz_parity --cases $(CASES)
	$(BIN)/python -m tests.faults.fuzz_resume --cases $(CASES)

docs: $(VENV)/installed  ## build the static site in site/ from docs/; broken links fail the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/installed  ## check format, lint, prose and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/prose.py
	$(BIN)/mypy
	$(BIN)/mypy examples/imagenet/*.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python

check: lint test-all  ## check format, lint and types, then run all tests

format: $(VENV)/installed  ## write the stubs of public names, format the code and apply lint fixes
	$(BIN)/python scripts/public_names.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(VENV)/installed  ## write constraints-dev.txt; for the newest versions, with VENV=.venv-lock LOCK=constraints.txt
	$(BIN)/python scripts/lock.py >$(VENV)/lock.txt
	mv $(VENV)/lock.txt constraints-dev.txt

# Extras of increasing size: for the demo, for the tests not marked slow, and for development.
$(VENV)/demo: EXTRA := demo
$(VENV)/test: EXTRA := test
$(VENV)/installed: EXTRA := dev
$(VENV)/demo $(VENV)/test: CONSTRAINTS := constraints.txt
$(VENV)/installed: CONSTRAINTS := $(LOCK)
$(VENV)/demo $(VENV)/test $(VENV)/installed: setup.cfg pyproject.toml constraints.txt constraints-dev.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRA)]'
	touch $@

$(PEERS)/installed: benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps --upgrade --target $(PEERS)/catalyst-21.12 catalyst==21.12
	touch $@

clean:  ## remove virtual environments and generated files
	rm -rf $(VENV) .venv-dev .venv-lock .venv-versions $(PEERS) .coverage* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis site
