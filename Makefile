# Two commands: `make serve` and `make test`. `make help` lists the rest.
#
# PIP_ARGS   extra arguments for pip, such as the index of PyTorch's CPU wheels (README)
# PYTHON     the interpreter that .venv is made from
# ARGS       flags for `paceline serve` or `paceline prove`; PORT is short for --port
# URL        the running server that `make prove` measures, as PACELINE_URL; one is started if not given
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PORT ?=
URL ?= $(PACELINE_URL)
VENV := .venv
BIN := $(VENV)/bin
NEED_MB := 3000

.DEFAULT_GOAL := help
.PHONY: help setup serve prove test test-system check bench clean

help:
	@echo "make serve        install and serve the default model on http://127.0.0.1:8000"
	@echo "make prove        measure the speed-up, minutes long: a table, the verdict, prove.json and prove.html"
	@echo "make test         the whole test suite of the core"
	@echo "make test-system  tests that take minutes, or environments of their own"
	@echo "make check        ruff, pyright, import contracts, size limits"
	@echo "make bench        the speed table of docs/performance.md on this machine, in five minutes"
	@echo "make setup        install only, with what the tests need"
	@echo "make clean        remove .venv and caches (models stay in their cache)"

setup: $(VENV)/.dev

# exec: Ctrl-C reaches the server itself, which ends the engine process and then itself.
serve: $(VENV)/.core
	@exec $(BIN)/paceline serve $(if $(PORT),--port $(PORT)) $(ARGS)

prove: $(VENV)/.prove
	@$(BIN)/paceline prove --quick $(if $(URL),--url $(URL)) --json prove.json --html prove.html $(ARGS)

# Files in the order of their names: xdist would begin with those of many tests, and the longest have few.
test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit --numprocesses=auto --dist=loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/python -m pytest tests/e2e -m "not system" $(ARGS)

test-system: $(VENV)/.dev
	$(BIN)/python -m pytest tests/system tests/e2e -m system $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/python .ci/limits.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/decode.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The stamps say what is installed, so that a second start asks no index. --no-compile: Python compiles what it
# imports, which is a small part of what is installed; compiling everything took longer than downloading it.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt $(PIP_ARGS)

$(VENV)/.python:
	@bash .ci/python-check "$(PYTHON)" $(NEED_MB)
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The C sources are compiled when the package is installed.
NATIVE := hatch_build.py $(wildcard src/paceline/native/*.c src/paceline/native/*.h src/paceline/native/compile.py)

$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt $(NATIVE)
	@echo "installing paceline and its pinned dependencies (torch is the large one)"
	@$(PIP) -e . || { echo "pip failed: see its message above; 'df -h .' shows the disk, PIP_ARGS adds arguments for pip" >&2; exit 3; }
	@touch $@

$(VENV)/.prove: $(VENV)/.core
	@echo "installing what the measurement needs"
	@$(PIP) -e '.[prove]' || { echo "pip failed: see its message above; 'df -h .' shows the disk, PIP_ARGS adds arguments for pip" >&2; exit 3; }
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev]' || { echo "pip failed: see its message above; 'df -h .' shows the disk, PIP_ARGS adds arguments for pip" >&2; exit 3; }
	@touch $@
