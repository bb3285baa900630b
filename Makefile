# Everything a person types. `make` alone explains.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTEST_ARGS ?=
export PYTHON GPU

.PHONY: help setup quickstart up down test check bench-train format lock clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

setup: ## virtual environment with the pinned packages (GPU=1: with CUDA; PYTHON=: the interpreter)
	@tools/setup_environment.sh

# exec: Ctrl-C and SIGTERM reach the run itself, which ends what it started.
quickstart: setup ## train a small policy to use a tool, from nothing, and show what it learnt
	@exec $(BIN)/roundhouse quickstart

up: setup ## start Prefect, MLflow and Ray on this machine
	@exec $(BIN)/roundhouse up

down: setup ## end them and everything they started
	@exec $(BIN)/roundhouse down

# One OpenMP thread: tests run beside servers and engines on few cores, where more threads only wait for each other.
test: setup ## the test suite (PYTEST_ARGS="tests/infra -k port")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-train: setup ## seconds and tokens of a training step: packed, padded, naive
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/train_step.py

format: setup ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup ## resolve requirements.lock anew from pyproject.toml (UPGRADE=1: newest versions)
	@tools/lock_requirements.sh

clean: ## remove caches and build output; the environment and the runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
