# Two commands matter: `make run` starts the broker, `make test` proves it. Both set up what is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN_ARGS ?= --store ./data
PYTEST := $(BIN)/python -m pytest -m "not soak"
ALONE := tests/unit tests/crash tests/fuzz tests/process tests/bench tests/simulation
SPARK := tests/spark

SEEDS ?= 100
FROM ?= 0

.PHONY: help run test unit interop crash fuzz simulate bench soak lint type format check peers clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("duemq needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }

$(VENV)/.broker: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[broker]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[broker,spark,dev]'
	@touch $@ $(VENV)/.broker

run: $(VENV)/.broker ## Start the broker with its name server on 127.0.0.1 (RUN_ARGS="--store ./data")
	exec $(BIN)/duemq serve $(RUN_ARGS)

peers: $(VENV)/.dev ## Fetch Apache's brokers and clients and compile the test programs
	$(BIN)/python -m tests.peers install

test: $(VENV)/.dev peers ## Set up the peers and run every test but the soak
	@# Three runs beside each other: what uses the processors, Spark's, and what mostly waits for brokers and clients.
	@$(PYTEST) -p no:cacheprovider $(ALONE) > .alone.log 2>&1 & alone=$$!; \
	$(PYTEST) -p no:cacheprovider $(SPARK) > .spark.log 2>&1 & spark=$$!; \
	trap 'kill $$alone $$spark 2>/dev/null' INT TERM; \
	$(PYTEST) $(addprefix --ignore ,$(ALONE) $(SPARK)); rest=$$?; \
	wait $$alone; alone=$$?; wait $$spark; spark=$$?; cat .alone.log .spark.log; rm -f .alone.log .spark.log; \
	if [ $$rest$$alone$$spark != 000 ]; then \
		echo "make test: failed ($(ALONE): $$alone, $(SPARK): $$spark, others: $$rest)"; exit 1; \
	fi

unit: $(VENV)/.dev ## Run the tests that need no peer (some minutes)
	$(BIN)/python -m pytest tests/unit

interop: peers ## Run the tests with Apache's brokers, clients and mqadmin
	$(BIN)/python -m pytest tests/interop

crash: $(VENV)/.dev ## Run the crash images and the kill -9 tests
	$(BIN)/python -m pytest tests/crash -m "not soak"

fuzz: $(VENV)/.dev ## Feed a live broker with malformed input
	$(BIN)/python -m pytest tests/fuzz

simulate: $(VENV)/.dev ## Live on a simulated machine (SEEDS=100 FROM=0): faults of all kinds, promises checked
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM) --processes $$(nproc)

bench: peers ## Measure this broker beside Apache's, one table
	$(BIN)/python -m tests.bench

soak: $(VENV)/.dev ## The long tests: 500 times kill -9 under load
	$(BIN)/python -m pytest -m soak --timeout 0

lint: $(VENV)/.dev ## Check the style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: $(VENV)/.dev ## Check the types
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

check: lint type unit ## What to run before a commit

clean: ## Remove the virtual environment and the caches; the store stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
