# make demo: the main job.  make test: what must hold.  make lab: JupyterLab on notebooks/.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?=
# Options of JupyterLab; it refuses to run as root (as in most containers) unless told.
LAB    ?= $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help install demo lab test lint soak gpu-check hazards clean

help:
	@echo "make demo        train a drafter on the packaged target, decode with it, draw the recompile timeline"
	@echo "make test        lint, types, layers, every test that matters"
	@echo "make lab         JupyterLab on notebooks/"
	@echo "make soak        the long counts (hours; results in benchmarks/results/soak_*.json)"
	@echo "make gpu-check   what needs a GPU, in ten minutes (docs/gpu_check.md: all of it, in three calls)"
	@echo "make hazards     the hazard matrix of the installed torch (TORCH=2.14.1: of that one)"

# One stamp per virtual environment: installing again happens only when a list of dependencies changed.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[notebook,target,tensorboard,trackio,test]"
	$(BIN)/python -m pip install --quiet --no-deps $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['tool']['dflash']['no-deps'])")
	@touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/python -m dflash_lib demo

lab: install
	$(BIN)/jupyter lab --notebook-dir notebooks $(LAB)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not gpu and not soak" tests

soak: install
	$(BIN)/python -m pytest -m soak tests

gpu-check: install
	$(BIN)/python benchmarks/gpu_check.py

# make hazards            the installed torch
# make hazards TORCH=2.14.1   another release, in an environment of its own
ifeq ($(TORCH),)
hazards: install
	$(BIN)/python -m dflash_lib hazards
else
hazards:
	@test -x .venv-torch-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet "torch==$(TORCH)" transformers safetensors pydantic pyyaml typer tqdm numpy
	.venv-torch-$(TORCH)/bin/python -m dflash_lib hazards
endif

clean:
	rm -rf $(VENV) .venv-torch-* *.egg-info
