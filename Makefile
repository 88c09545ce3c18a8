# worldstream: `make play` and `make test` each work on a bare machine; `make setup` comes with them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup play video test lint clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# The release that the recorded numbers were made with; any torch >= 2.11 works.
TORCH ?= torch==2.13.0
TEST_WORKERS ?= 2
VIDEO := worldstream-video.mp4
PACKAGES := engine graphs vae_stream stream miniworld benchmarks tests

help:
	@echo "make setup   create $(VENV) and install everything (quick when nothing changed)"
	@echo "make play    start the service and print the URL of the page that plays the small world"
	@echo "make video   make a video of a walk through the small world: ./$(VIDEO)"
	@echo "make test    lint, then the tests that need no GPU"
	@echo "make lint    formatting, lint, types, layers, spelling"

setup: $(STAMP)

# Python is searched for only when there is something to install.
$(STAMP): pyproject.toml Makefile
	@python=; for name in $${PYTHON:-} python3.12 python3.11 python3.13 python3 python; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make setup: no Python >= 3.11 found; install it (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make setup PYTHON=/path/to/python3" >&2; exit 3; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "make setup: $$python lacks venv or ensurepip (pip); install them (Debian, Ubuntu: apt-get install python3-venv python3-pip)" >&2; exit 3; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "make setup: creating $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); \
	fi
	@if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	  echo "make setup: $(VENV) has no pip; remove $(VENV) and run make setup again" >&2; exit 3; \
	fi
	@if $(BIN)/python -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; then \
	  echo "make setup: torch is there already"; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
	  echo "make setup: CUDA found, installing $(TORCH)"; $(BIN)/python -m pip install --quiet "$(TORCH)"; \
	elif $(BIN)/python -m pip install --quiet --dry-run --no-deps --report - "$(TORCH)" 2>/dev/null | grep -q '"version": "[0-9.]*+cpu"'; then \
	  echo "make setup: no CUDA, installing $(TORCH) (CPU build)"; $(BIN)/python -m pip install --quiet "$(TORCH)"; \
	elif $(BIN)/python -m pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu "$(TORCH)"; then \
	  echo "make setup: no CUDA, installed $(TORCH) (CPU build)"; \
	else \
	  echo "make setup: no CPU build of torch found, installing the default build of $(TORCH)"; $(BIN)/python -m pip install --quiet "$(TORCH)"; \
	fi
	@echo "make setup: installing worldstream and its tools"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@
	@echo "make setup: done"

play: setup
	@exec $(BIN)/worldstream serve

video: setup
	@$(BIN)/worldstream generate --scene meadow-forest --actions miniworld/walk.jsonl --chunks 12 \
	  --out $(VIDEO) --force

lint: setup
	@$(BIN)/ruff format --check $(PACKAGES)
	@$(BIN)/ruff check $(PACKAGES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell $(wildcard *.md engine/*.md miniworld/*.md) Makefile pyproject.toml $(PACKAGES) web_client

# One thread a worker: two workers with two threads each only wait for each other on two cores.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cpu -n $(TEST_WORKERS) --dist worksteal

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
