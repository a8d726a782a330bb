# make demo: from nothing to an answer.   make test: every check.   make lint | bench | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/installed
	$(BIN)/kvchat models pull
	$(BIN)/kvchat ask --kv kivi2 sample_docs/harbour-handbook.pdf "What is the inventory number of the master copy?"

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy kvchat kernels

bench: $(VENV)/installed
	$(BIN)/kvchat models pull --quiet
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/answers.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/quotes.py

# Plain `torch` brings gigabytes of CUDA: where no NVIDIA GPU is present, the CPU build goes in first.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	command -v nvidia-smi >/dev/null || $(BIN)/python -m pip install --quiet "$$(cat .ci/torch-cpu.txt)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
