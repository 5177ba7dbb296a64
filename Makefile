# make test    style, types, import layers and all tests
# make demo    from nothing to a trained, exported and verified model
# make lint    everything of `make test` but the tests
# make format  rewrite the sources in the style that lint asks for
# make clean   remove the virtual environment and everything made by the targets above

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
BIN := .venv/bin
STARTED := $(shell date +%s)
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard hp_*/pyproject.toml))
# Compiling is left to one pass over all packages, on all cores.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-build-isolation -c constraints.txt

.PHONY: test demo lint format clean

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest

lint: .venv/tools.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/tools.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .venv/hp.done
	BIN=$(BIN) STARTED=$(STARTED) examples/demo/run.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache outputs

# The build backend comes first: without build isolation nothing is downloaded twice, and its version is pinned too.
.venv/hp.done: constraints.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing hp into .venv (a minute or two)"
	$(INSTALL) hatchling editables
	$(INSTALL) $(DISTRIBUTIONS:%=-e ./%)
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # torch ships files for later Pythons
	touch $@

.venv/tools.done: .venv/hp.done
	$(INSTALL) pytest ruff mypy import-linter
	touch $@
