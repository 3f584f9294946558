# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PACKAGES := controlplane workers placement profiler
CODE := $(PACKAGES) testkit tests benchmarks scripts
# Which tests run in one process, and which processes start engines: tests/side_by_side.py.
SIDE_BY_SIDE := -n 3 --dist loadscope --no-loadscope-reorder

# Tests start hundreds of processes: our code is compiled once for all of them.
test test-long unit: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-long unit check format bench dist up down install install-dev system tools clean help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

# What is installed waits for downloads, for unpacking and for Debian in turn: `make` does these at once.
MAKEFLAGS += --jobs=4
PIP_INSTALL = $(BIN)/pip install --disable-pip-version-check --progress-bar off --no-deps

install: $(VENV)/.installed  ## Make .venv with everything Ostinato needs on a CPU machine
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@echo "creating $(VENV)"
	@test -x $@ || $(PYTHON) -m venv $(VENV)

$(VENV)/.packages: requirements/cpu.txt | $(BIN)/python
	@echo "installing torch and the locked packages (about 500 MB to download; a few minutes)"
	@{ echo "$(TORCH)"; grep -v '^torch==' requirements/cpu.txt; } > $(VENV)/requirements.txt
	@$(PIP_INSTALL) -r $(VENV)/requirements.txt > $(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	@echo "installing ostinato"
	@$(PIP_INSTALL) -q -e . >> $(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log; exit 1; }
	@$(BIN)/python -m workers.engine.torch_check
	@touch $@

$(VENV)/.dev-packages: requirements/dev.txt | $(BIN)/python
	@echo "installing the tools for tests and checks"
	@$(PIP_INSTALL) -r requirements/dev.txt > $(VENV)/install-dev.log 2>&1 || { tail -n 20 $(VENV)/install-dev.log; exit 1; }
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(VENV)/.dev-packages
	@touch $@

system:  ## Install the programs from Debian that the tests use (as root), or say which are missing
	@sh scripts/system_packages.sh

tools: system  ## Fetch helm and kubectl into .tools
	@$(PYTHON) scripts/fetch_tools.py

demo: install  ## Install, then register, deploy and ask a real model; leaves nothing running
	@$(BIN)/ostinato demo

up: install  ## Start a local cluster and leave it running
	@$(BIN)/ostinato up

down:  ## Stop it
	@$(BIN)/ostinato down

# After `make check test` has begun with its checks, tests have the cores for themselves.
ifneq (,$(filter check,$(MAKECMDGOALS)))
test test-long unit: check
endif

test: install-dev system tools  ## Install, then run all tests but the long ones
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not long" $(PYTEST_ARGS)

test-long: install-dev system tools  ## Rare runs: the second bundled model, long rehearsals, many new examples
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -n 2 -m "not slow and not long" $(PYTEST_ARGS)

unit: install-dev  ## Only the fast tests
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

check: install-dev  ## Format, lint, types, import contracts
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	sh scripts/types_of_tests.sh $(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev  ## Format and fix what can be fixed
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: install-dev  ## The gateway benchmark; writes benchmarks/results
	$(BIN)/python -m benchmarks.gateway

dist: install  ## Build the wheel, dist/ostinato-*.whl
	@rm -rf build dist  # what an earlier build left would be packed, too
	@$(BIN)/pip wheel --disable-pip-version-check -q --no-deps -w dist .
	@ls dist/*.whl

clean:  ## Remove the environment and fetched tools
	rm -rf $(VENV) .tools build dist *.egg-info
