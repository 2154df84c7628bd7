# One word per task. `make qualify` and `make test` are all that a newcomer needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build used for development; users with GPUs keep the torch that their image brings (2.11 to 2.13).
TORCH ?= torch==2.13.0
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: install qualify test lint bench docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[pipeline,development]"
	touch $@

qualify: install
	$(BIN)/qualify run

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m bench

docs: install
	$(BIN)/python -m flows.cli.reference > docs/commands.md

clean:
	rm -rf $(VENV) build dist
