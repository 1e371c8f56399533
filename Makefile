# make demo and make test do all set-up themselves; see README.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin

# Hundreds of interpreters start in the tests: what they read is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-full pages fuzz check types laws docs
.DEFAULT_GOAL := help

help:
	@echo "make demo        the whole journey on this machine: plan, predict, train, compare, look"
	@echo "make test        style, types and every test that a change must pass"
	@echo "make pages       every command of the README and the docs, run; a change must pass it too"
	@echo "make test-full   all tests, the slow ones and those of pages too"
	@echo "make fuzz        a million broken inputs, no two alike; most of an hour on two idle cores"
	@echo "make check       style, types and the laws of the house; no processes started"
	@echo "make bench-NAME  one benchmark of benchmarks/ (a table target | measured; raw JSON kept)"
	@echo "make docs        the documentation as pages under site/"

setup:
	@test -n "$(PYTHON)" || { echo "setup: no python3 found; run: apt-get install python3 python3-venv" >&2; exit 4; }
	@$(PYTHON) tools/setup.py

demo: setup
	@$(BIN)/python examples/demo.py

fuzz: setup
	@$(BIN)/python -m tests.fuzz --processes 2

check: setup
	@$(MAKE) --no-print-directory --jobs 2 types laws

types:
	@$(BIN)/mypy

laws:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest tests/test_architecture.py
	@told=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$told"; exit 1; }  # compiled for all that run tests

# Tests wait about as long as they compute: three at a time keep two cores busy.
test: check
	@$(BIN)/python -m pytest -m "not slow and not pages and not gpu" --durations=30 -n 3 --dist worksteal --ignore tests/test_architecture.py

pages: setup
	@$(BIN)/python -m pytest -m pages --durations=30 -n 3 --dist worksteal tests/docs

test-full: check
	@$(BIN)/python -m pytest -m "not gpu" --hypothesis-profile searching --ignore tests/test_architecture.py

bench-%: setup
	@$(BIN)/python benchmarks/$*/run.py

docs: setup
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@$(BIN)/zensical build --clean
