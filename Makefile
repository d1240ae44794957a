# `make` prints what there is. Python 3.11 or 3.12, gcc and make are all that a fresh machine needs.
SHELL := /bin/bash
PYTHON := $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit lint format reference clean

help: ## Print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
		while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: ## Make .venv and install the pinned packages (does nothing when they are there)
	@$(PYTHON) scripts/setup.py

demo: setup ## Train a small model with rewards and a teacher on this CPU, and show that it improved
	@$(BIN)/python launch.py +recipe=grpo_prm_distill

test: setup ## Run every test that needs no GPU
	@$(BIN)/python -m pytest -m "not gpu" tests

test-unit: setup ## Run the tests that start no engine, trainer or Ray
	@$(BIN)/python -m pytest -m "not gpu and not slow" tests/unit

lint: setup ## Check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup ## Rewrite the sources in the house format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

reference: setup ## Rewrite docs/configuration.md from conf/
	@$(BIN)/python -m rlpost.config_reference

clean: ## Remove caches (keeps .venv and outputs/)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
