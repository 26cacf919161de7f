# The main targets: `make run` starts the broker, `make test` runs all tests. Both install what is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# Distributions build Python with the optimizations that version managers leave out by default, and that save a fourth of
# its CPU. So Debian's is taken if its package python3-venv is there, too.
PYTHON ?= $(shell /usr/bin/python3.11 -c 'import ensurepip' 2>/dev/null && echo /usr/bin/python3.11 || \
	command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN_ARGS ?= --store ./data
PYTEST := $(BIN)/python -m pytest -m "not soak" --durations 15 --durations-min 5
SPARK := tests/spark
# Three runs at once: the unit tests, Spark's, and those that mostly wait for brokers and clients. A run that ends goes on
# with the parts that are left, the longest first, so that no processor waits.
# Tests in none of these lists run with the interop tests.
UNIT := $(filter-out %/__pycache__/ %/scheduler/,$(wildcard tests/unit/*/ tests/unit/test_*.py))
LEFT := storeless process faults scheduler mqtt
# Those that need no peer.
EARLY := scheduler faults
# Spark's tests that need no Spark: they have a broker read generated stores, and a browser show reports.
storeless := $(patsubst %,tests/spark/%.py,tables/test_generated test_report)
process := tests/process
faults := tests/crash tests/fuzz tests/simulation
scheduler := tests/unit/scheduler
mqtt := tests/interop/mqtt
# Brokers of unit tests sync many files, which costs more than the tests themselves: their files are in /dev/shm, if that
# has 2 GB free. Tests that need a real disk take the fixture `on_disk`.
MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 2000000 {print "PYTEST_DEBUG_TEMPROOT=/dev/shm"}')
IN_MEMORY := $(MEMORY) $(PYTEST)
# Python keeps its compiled files, since the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

LOCK := requirements/broker.txt
DIST ?= dist
SEEDS ?= 100
WHAT ?= sends
FROM ?= 0

.PHONY: docs help run test unit quick interop crash fuzz simulate bench profile soak lint type format check peers lock \
	audit dist release clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(BIN)/python:
	@command -v "$(PYTHON)" > /dev/null || { echo "there is no Python 3.11 or newer: install it, or name one with PYTHON="; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit("duemq needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }

$(VENV)/.broker: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[broker]'
	@touch $@

# The pip that Python 3.11 brings needs twice the time to choose the versions of the hundred packages for development.
$(VENV)/.pip: | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	@touch $@

# Without compiled files: Python compiles a module when it is first imported, and most never are.
$(VENV)/.dev: pyproject.toml | $(VENV)/.pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable '.[broker,spark,dev]'
	@touch $@ $(VENV)/.broker

# The tests also run with the oldest Spark that pyproject.toml allows.
$(VENV)/.oldest-spark: pyproject.toml | $(VENV)/.pip
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(VENV)/oldest-spark \
		"pyspark==$$(sed -n 's/.*"pyspark>=\([0-9.]*\)".*/\1/p' pyproject.toml).0"
	@touch $@

# In an environment of their own: the tools' requirements are none of the project's.
$(VENV)/tools/bin/pip-compile: | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/tools
	$(VENV)/tools/bin/pip install --quiet --disable-pip-version-check pip-audit pip-tools

run: $(VENV)/.broker ## Start the broker with its name server on 127.0.0.1 (RUN_ARGS="--store ./data")
	exec $(BIN)/duemq serve $(RUN_ARGS)

peers: $(VENV)/.dev ## Fetch Apache's brokers and clients and compile the test programs
	$(BIN)/python -m tests.peers install

test: ## Install the peers and run all tests except the soak tests
	@# pip works on one processor, so both installations run at once. The unit tests need no peer, so they run while peers
	@# are installed, and so do other parts if that takes more than some seconds.
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev $(VENV)/.oldest-spark
	@rm -rf .part && mkdir .part; \
	run() { name=$$1; shift; "$$@" > .part/$$name.log 2>&1; echo $$? > .part/$$name.status; }; \
	take() { mkdir .part/$$1 2>/dev/null && run "$$@"; }; \
	$(foreach part,$(LEFT),$(part)() { take $(part) env $(if $(filter tests/unit/%,$($(part))),$(MEMORY)) $(PYTEST) -p no:cacheprovider $($(part)); };) \
	left() { $(foreach part,$(LEFT),$(part);) }; \
	early() { sleep 5; $(foreach part,$(EARLY),[ -e .part/peers ] || $(part);) }; \
	trap 'kill $$(jobs -p) 2>/dev/null' INT TERM; \
	run unit env $(IN_MEMORY) -p no:cacheprovider $(UNIT) & unit=$$!; \
	early & early=$$!; \
	$(MAKE) --no-print-directory peers || { pkill -P $$unit; pkill -P $$early; exit 1; }; touch .part/peers; \
	{ while kill -0 $$unit 2>/dev/null; do sleep 1; done; left; } & \
	{ run spark $(PYTEST) -p no:cacheprovider $(addprefix --ignore ,$(storeless)) $(SPARK); left; } & \
	$(PYTEST) $(addprefix --ignore ,$(UNIT) $(SPARK) $(foreach part,$(LEFT),$($(part)))); failed=$$?; \
	left; wait; cat .part/*.log; \
	for name in unit spark $(LEFT); do \
		status=$$(cat .part/$$name.status); \
		if [ "$$status" != 0 ]; then echo "make test: the part '$$name' failed ($$status)"; failed=1; fi; \
	done; \
	rm -rf .part; exit $$failed

unit: $(VENV)/.dev ## Run the unit tests, which need no peer (some minutes)
	$(IN_MEMORY) tests/unit

quick: $(VENV)/.dev ## Run the unit tests that take seconds: structure, protocol, client, store
	@run() { $(IN_MEMORY) -q -p no:cacheprovider --hypothesis-profile quick "$$@"; }; failed=0; \
	run tests/unit/storage & storage=$$!; \
	run tests/unit/duemq --ignore tests/unit/duemq/mqtt_bridge --ignore tests/unit/duemq/cli & client=$$!; \
	run tests/unit/duemq/cli & cli=$$!; \
	run tests/unit/test_structure.py tests/unit/protocol || failed=1; \
	for part in $$storage $$client $$cli; do wait $$part || failed=1; done; exit $$failed

interop: peers ## Run the tests with Apache's brokers, clients and mqadmin
	$(BIN)/python -m pytest tests/interop

crash: $(VENV)/.dev ## Run the crash images and the kill -9 tests
	$(BIN)/python -m pytest tests/crash -m "not soak"

fuzz: $(VENV)/.dev ## Send malformed input to a running broker
	$(BIN)/python -m pytest tests/fuzz

simulate: $(VENV)/.dev ## Run brokers on a simulated machine with faults of all kinds, and check them (SEEDS=100 FROM=0)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM) --processes $$(nproc)

bench: $(VENV)/.dev ## Measure duemq and Apache's broker, and print one table
	$(BIN)/python -m tests.peers install --bench
	$(BIN)/python -m tests.bench

profile: $(VENV)/.dev ## Show where the hot path spends its time (WHAT=sends, signed, timers, levels or pulls)
	$(BIN)/python -m tests.bench.profile $(WHAT)

soak: $(VENV)/.dev ## Run the soak tests: 500 times kill -9 under load, thousands of examples, all seeds
	$(BIN)/python -m tests.peers install --bench
	$(BIN)/python -m pytest -m soak --timeout 0
	$(IN_MEMORY) --timeout 0 --hypothesis-profile soak tests/unit

lint: $(VENV)/.dev ## Check the style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: $(VENV)/.dev ## Check the types
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## Build the pages for users and the reference of the Python client, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

check: lint type quick ## Check the style and the types, and run the quick tests: before each commit

# Kept as they are unless pyproject.toml asks for others; `make lock UPGRADE=--upgrade` takes the newest ones.
lock: $(VENV)/tools/bin/pip-compile ## Lock the versions and hashes of what a broker needs (network)
	@grep '^#' $(LOCK) > $(LOCK).head
	$(VENV)/tools/bin/pip-compile --quiet $(UPGRADE) --generate-hashes --strip-extras --no-header --no-emit-index-url \
		--no-emit-trusted-host --no-emit-find-links --extra broker --extra auth --extra mqtt --output-file $(LOCK) pyproject.toml
	@cat $(LOCK).head $(LOCK) > $(LOCK).new && mv $(LOCK).new $(LOCK) && rm $(LOCK).head

audit: $(VENV)/tools/bin/pip-compile ## Ask an advisory database about the locked versions (network)
	$(VENV)/tools/bin/pip-audit --strict --disable-pip --require-hashes --requirement $(LOCK)

# The wheel, the source distribution, and a file of requirements that has their hashes and those of all that they need.
# They are built from an export of the commit: hatchling would also pack files that are ignored, or not known to git. Two
# builds of one commit are equal. KEY: a private SSH key, with which the hashes of all these files are signed.
dist: $(VENV)/.dev ## Build a wheel and a source distribution of HEAD, with signed hashes if KEY is an SSH key, into dist/
	rm -rf $(DIST) && mkdir -p $(DIST)
	@test -z "$$(git status --porcelain)" || echo 'changes that are not committed are not built: these are files of HEAD' >&2
	@set -o pipefail; work=$$(mktemp -d) && trap "rm -rf $$work" EXIT && mkdir $$work/tree && \
	{ git -c core.autocrlf=false archive HEAD | tar -x -C $$work/tree || \
		{ echo 'make dist builds a commit: run it in a clone of the repository' >&2; exit 1; }; } && \
	{ $(BIN)/python -m build $(BUILD_OPTIONS) --outdir $(DIST) $$work/tree > $$work/log 2>&1 || { cat $$work/log; exit 1; }; } && \
	version=$$(sed -n 's/^version = "\(.*\)"/\1/p' $$work/tree/pyproject.toml) && \
	{ cat $$work/tree/$(LOCK) && echo "duemq==$$version \\" && $(BIN)/pip hash $(DIST)/* \
		| sed -n 's/^--hash/    &/p' | sed '$$!s/$$/ \\/'; } > $$work/requirements.txt && \
	cp $$work/requirements.txt $(DIST)/duemq-$$version-requirements.txt
	cd $(DIST) && sha256sum * > $(abspath $(VENV))/SHA256SUMS && mv $(abspath $(VENV))/SHA256SUMS .
	$(if $(KEY),ssh-keygen -q -Y sign -n duemq -f $(KEY) $(DIST)/SHA256SUMS)

release: audit ## Build a release of the commit that is checked out: dist with its advisories looked up (network; KEY=)
	@test -n '$(KEY)' || { echo 'give KEY=, the private SSH key that signs the hashes'; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo 'there are changes that are not committed: a release is a commit'; exit 1; }
	$(MAKE) dist

clean: ## Remove the virtual environment and the caches; the store stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
