# Everything runs in .venv, which the first target creates. `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NODE_BIN := node_modules/.bin
NODE_READY := node_modules/.ready
# Two per CPU: tests spend much of their time waiting for other processes.
WORKERS ?= $(shell echo $$(( $$(nproc) * 2 )))

.PHONY: help install run demo check test soak soak-short soak-pages chaos newcomer lint format typecheck types bench docs pictures screenshots wire wirecheck golden messages architecture clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.NOTPARALLEL:

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is missing: install Python 3.11 or later (as root: apt-get install python3 python3-venv)' >&2; exit 1; }
	@$(PYTHON) tests/prerequisites.py install venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(NODE_READY): package.json package-lock.json
	@$(PYTHON) tests/prerequisites.py install node
	npm ci --silent --no-audit --no-fund
	@touch $@

install: $(READY) ## Create .venv with gpulse and everything that its tests need

run: $(READY) ## Take one look at this machine
	$(BIN)/gpulse

demo: $(READY) ## Start a simulated cluster with its dashboard
	$(BIN)/gpulse demo

check: lint ## Run the linters and the fast tests: no servers, none longer than a second
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'not slow' tests/unit tests/contract

# With the lowest priority: the processes of a head that lower theirs would wait for those that do not.
test: $(READY) ## Run all tests; install the programs that they need where permitted, and skip tests whose programs are missing
	@$(BIN)/python tests/prerequisites.py install test
	nice -n 19 $(BIN)/pytest -n $(WORKERS) --dist worksteal

chaos: $(READY) ## Cut the power 20 times, and damage data directories and spools 1,000 times each; see docs/explanation/durability.md
	GPULSE_POWER_CUTS=20 GPULSE_MUTATIONS=1000 $(BIN)/pytest -n $(WORKERS) tests/integration/test_power_cut.py tests/integration/test_damage.py tests/unit/test_spool_damage.py

soak: $(READY) ## Run a whole cluster for MINUTES (30), with restarts, and check that it stays correct; soak-short: 3 minutes
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

soak-short: $(READY)
	$(BIN)/python -m tests.soak --minutes 3 $(if $(SEED),--seed $(SEED))

soak-pages: $(READY) ## Hold every page of the dashboard open for MINUTES (10)
	$(BIN)/python -m tests.soak.pages --minutes $(or $(MINUTES),10)

lint: $(READY) $(NODE_READY) ## Check style, types and import rules, also those of the dashboard
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(NODE_BIN)/biome ci --error-on-warnings
	$(NODE_BIN)/tsc

format: $(READY) $(NODE_READY) ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(NODE_BIN)/biome check --write

typecheck: $(READY) $(NODE_READY) ## Check types only
	$(BIN)/mypy
	$(NODE_BIN)/tsc

types: $(READY) ## Write types/api.d.ts from the head's OpenAPI document
	$(BIN)/python -m tests.fixtures.api_types

bench: $(READY) ## Compare with nvitop, gpustat and a bare loop; writes benchmarks/RESULTS.md
	$(BIN)/pip install --quiet --disable-pip-version-check '.[bench]'
	$(BIN)/python -m benchmarks

docs: $(READY) ## Write the generated pages and man pages, and build the site into site/; a warning is an error
	$(BIN)/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(READY) ## Draw the pictures of the documentation from the code
	$(BIN)/python -m tools.docs.pictures
	$(BIN)/python -m tools.docs.dask_pictures

screenshots: $(READY) ## Take the screenshots that the documentation shows; with DIRECTORY=..., all pages in all themes into it
	$(BIN)/python -m tools.docs.screenshots $(DIRECTORY)

wire: ## Generate wire_pb2.py from wire.proto
	$(PYTHON) -m venv $(VENV)/wire
	$(VENV)/wire/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.64.3 'setuptools<80'
	cd src && ../$(VENV)/wire/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. gpulse/cluster/wire.proto

newcomer: ## Run the commands of README and docs in a minimal Debian; needs root
	$(PYTHON) -B tests/newcomer/walk.py

wirecheck: $(READY) ## Run the tests of the wire format with every supported version of protobuf
	tests/wire_check.sh $(BIN)/python

golden: $(READY) ## Rewrite the expected outputs after an intended change of the views
	UPDATE_GOLDEN=1 $(BIN)/pytest -n auto tests/integration/test_cli_golden.py tests/integration/test_verdict_golden.py tests/unit/test_cluster_top.py

messages: $(READY) ## Write all texts that users see to tests/messages.txt, to be read in one go
	$(BIN)/python -m tests.messages --write

architecture: $(READY) ## Print the sizes of the code in src and accept them; a test fails when one gets worse
	$(BIN)/python -m tests.architecture

clean: ## Remove .venv, node_modules, site and caches
	rm -rf $(VENV) node_modules site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
