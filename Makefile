# `make demo` and `make test` set up everything they need in .venv, and say what they do.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait sleep. Spinning, as is OpenMP's default, made the demo three times slower on a
# machine whose two cores had other work to do.
export OMP_WAIT_POLICY ?= PASSIVE

help:  ## Say what can be made.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

.venv/.installed: pyproject.toml constraints.txt
	@echo "== setting up .venv (torch and transformers; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/.installed  ## Quantize a real model to every family of formats, and measure it.
	@echo "== anybit demo"
	@$(BIN)/anybit demo

test: .venv/.installed  ## Lint, check types and run all tests; needs no GPU.
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 15

test-gpu:  ## Run the kernel tests on the GPU of this machine, with the python in PATH.
	@ANYBIT_TEST_DEVICE=cuda $(PYTHON) -m pytest -p no:cacheprovider tests/kernels

soak: .venv/.installed  ## Ten minutes of mixed load on a server: no token lost, no block held.
	@$(BIN)/python tests/serve/soak.py --seconds 600

clean:  ## Remove the environment and what was made.
	rm -rf .venv out build dist *.egg-info

.PHONY: help demo test test-gpu soak clean
.DEFAULT_GOAL := help
