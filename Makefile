# `make demo` and `make test` work on a bare Linux machine with Python 3.11 or 3.12; both make their own
# environment first. Another interpreter or folder: make PYTHON=python3.12 VENV=.venv312 test
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
DEMO_OUT ?= out/demo.jsonl
# Test files side by side, each with an engine of three processes (about 2.5 GB); 0: one after the other.
TEST_WORKERS ?= 0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(shell command -v uv || echo $(VENV)-uv/bin/uv)
MODEL := $(BIN)/s3r model fetch
TYPED := s3r_sglang/cli.py s3r_sglang/commands s3r_sglang/config.py s3r_sglang/cpu/__init__.py \
	s3r_sglang/doctor.py s3r_sglang/faults.py s3r_sglang/launch.py s3r_sglang/metrics.py s3r_sglang/models.py \
	s3r_sglang/prompts.py s3r_sglang/report.py s3r_sglang/rollout.py s3r_sglang/sampling.py \
	s3r_sglang/requests.py s3r_sglang/scheduler s3r_sglang/server rl_integration configs \
	kernels/ops kernels/reference

# The reference run on a CPU is one thread per process; more only contend with the scheduler and detokenizer.
export OMP_NUM_THREADS ?= 1
# An engine is three processes that each import SGLang: 14 s of CPU time with cached bytecode, 35 s without.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(abspath $(dir $(UV))):$(PATH)

.PHONY: setup demo test quick lint clean

setup: $(STAMP)

$(VENV)-uv/bin/uv:
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/pip install --quiet uv

$(STAMP): pyproject.toml setup.py | $(UV)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "s3r-sglang needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.11 setup"; exit 1; }
	test -x $(BIN)/python || $(UV) venv --quiet --seed --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	@echo "Installing SGLang, PyTorch and what the tests need into $(VENV): a few minutes, 9 GB on disk."
	$(UV) pip install --quiet --python $(BIN)/python -e '.[dev,bench]'
	touch $@

demo: setup
	model="$$($(MODEL) smollm2)" && \
	$(BIN)/s3r rollout --model "$$model" --prompts s3r_sglang/data/demo_prompts.jsonl \
		--group-size 2 --max-new-tokens 64 --compare --out $(DEMO_OUT) --force

test: setup
	$(MODEL) smollm2
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope

# The tests that take seconds each; they start no engine.
quick: setup
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadscope

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

clean:
	rm -rf $(VENV) $(VENV)-uv
