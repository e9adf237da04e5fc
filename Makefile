# What a fresh clone needs: `make demo` runs the engine, `make check` runs every check. Python ≥ 3.11 is all they ask for.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-vision test thorough baseline clients versions gpu check setup format proto clean

demo: $(VENV)/.installed-run
	$(BIN)/ridgeline generate "class LRUCache:" --max-tokens 128

# Pictures are drawn, and the embedded model that sees describes them.
demo-vision: $(VENV)/.installed-media
	$(BIN)/python -m ridgeline_bench.scripts.senses.demo

# Up to four files at a time, one more than there are cores, in the order of tests/conftest.py. SLOWEST=20 lists the slowest tests, as CI does.
# A test that fails runs once more and is listed if it passes then: cores that others use too make some processes late.
# What hypothesis found is kept, so it fails both times. Of tests that are dealt (tests/selection.py) a third of the cases
# run, by the day of the newest commit.
test: $(VENV)/.installed-test
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --reruns 1 -r fER $(if $(SLOWEST),--durations=$(SLOWEST))

# The cases that `make test` leaves out: it takes some of each kind, these are the rest.
thorough: $(VENV)/.installed-test
	$(BIN)/pytest -m thorough

# The host's calls of a step beside benchmarks/baseline.jsonl; a test does the same.
baseline: $(VENV)/.installed-test
	$(BIN)/python -W ignore -m ridgeline_bench.scripts.baseline

# Clients of others against our server (docs/clients.md). They want an older openai than the tests are pinned to, so they
# live in an environment of their own; of the pinned versions it has torch's alone.
# The agents among them come from npm and PyPI, each into a folder of its own below AGENTS, some 2 GB.
CLIENTS := build/clients
AGENTS ?= build/agents
clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m tests.serving.clients.agents $(AGENTS)
	RIDGELINE_AGENTS=$(AGENTS) $(CLIENTS)/bin/pytest -m clients

$(CLIENTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	grep '^torch==' constraints.txt >$(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -c $(CLIENTS)/constraints.txt -e '.[test,clients]'
	@touch $@

# The tests that compare with others' code, with the oldest and the newest torch, transformers and triton that
# pyproject.toml allows; a line each goes to benchmarks/results/versions.jsonl. See tests/versions.py.
versions:
	$(PYTHON) tests/versions.py $(if $(ONLY),--only $(ONLY)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(TESTS)

# On a machine with a GPU. `make gpu PART=1/2` runs one of two halves. What passed is listed in a file named after the
# code, and is left out the next time, so a run that was cut off goes on. What measures runs alone.
GPU_TESTS = $(shell grep -rlE --include='test_*.py' 'mark\.gpu|import DEVICES' tests)
TIMED = tests/api/test_sleep.py tests/bench/machine/% tests/bench/profile/% tests/worker/test_machine.py \
  tests/worker/test_second_gpu.py tests/worker/test_stopwatch.py
WORKERS ?= $(shell nproc)
CODE = $(shell find ridgeline tests -name '*.py' | LC_ALL=C sort | xargs cat | sha1sum | cut -c1-12)
GPU = $(BIN)/pytest -m gpu $(if $(PART),--part $(PART)) --resume build/gpu-$(CODE).passed
gpu: $(VENV)/.installed-test
	@mkdir -p build
	@$(GPU) --numprocesses $(WORKERS) --dist worksteal $(filter-out $(TIMED),$(GPU_TESTS)); parallel=$$?; \
	  $(GPU) $(filter $(TIMED),$(GPU_TESTS)); alone=$$?; \
	  for status in $$parallel $$alone; do case $$status in 0|5) ;; *) exit $$status;; esac; done  # 5: nothing was left

check: $(VENV)/.installed-dev
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== lint-imports"
	@$(BIN)/lint-imports
	@echo "== pytest"
	@$(MAKE) --no-print-directory test

setup: $(VENV)/.installed-dev

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PROTO := ridgeline/serving/grpc/proto
proto: $(VENV)/.installed-test
	for name in $(PROTO)/kserve $(PROTO)/ridgeline/v1/inference; do \
	  $(BIN)/python -m grpc_tools.protoc -I. --pyi_out=. --descriptor_set_out=$$name.binpb $$name.proto || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of packages, so that a second run starts at once.
$(VENV)/.installed-run: WHAT := .
$(VENV)/.installed-media: WHAT := .[media]
$(VENV)/.installed-test: WHAT := .[test]
$(VENV)/.installed-dev: WHAT := .[dev]
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '$(WHAT)'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Ridgeline needs Python 3.11 or newer, which $(PYTHON) is not; try: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
