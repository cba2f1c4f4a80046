# The verbs a newcomer guesses. Everything runs in .venv, which the first verb makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Half as many again as there are CPUs: much of a test's time is spent waiting for other processes.
WORKERS ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))

.PHONY: help install run demo test soak soak-short newcomer lint format typecheck bench docs screenshots wire wirecheck golden clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.NOTPARALLEL:

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is missing: install Python 3.11 or later (as root: apt-get install python3 python3-venv)' >&2; exit 1; }
	@$(PYTHON) tests/prerequisites.py install venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(READY) ## Make .venv with gpulse and everything its tests need

run: $(READY) ## One look at this machine
	$(BIN)/gpulse

demo: $(READY) ## A simulated cluster and its web page
	$(BIN)/gpulse demo

test: $(READY) ## Run all tests; installs the programs that they need where it may, and skips the tests whose programs are missing
	@$(BIN)/python tests/prerequisites.py install test
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

soak: $(READY) ## Run a whole cluster for MINUTES (30), with restarts, and check that it stays correct; soak-short: 3 minutes
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

soak-short: $(READY)
	$(BIN)/python -m tests.soak --minutes 3 $(if $(SEED),--seed $(SEED))

lint: $(READY) ## Linters, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

typecheck: $(READY) ## Types alone
	$(BIN)/mypy

bench: $(READY) ## Compare with nvitop, gpustat and a bare loop; writes benchmarks/RESULTS.md
	$(BIN)/pip install --quiet --disable-pip-version-check '.[bench]'
	$(BIN)/python -m benchmarks

docs: $(READY) ## Rebuild the documents and pictures that are made from the code
	$(BIN)/python -m gpulse.export.reference > docs/metrics.md
	$(BIN)/python -m gpulse.export.manual > docs/diagnosis.md
	$(BIN)/python docs/pictures.py
	PYTHONPATH=. $(BIN)/python docs/dask_pictures.py

screenshots: $(READY) ## Take the pictures of the dashboard anew, with Chromium
	$(BIN)/python docs/screenshots.py

wire: ## Make wire_pb2.py anew from wire.proto
	$(PYTHON) -m venv $(VENV)/wire
	$(VENV)/wire/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.64.3 'setuptools<80'
	cd src && ../$(VENV)/wire/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. gpulse/cluster/wire.proto

newcomer: ## Try every command of README and docs in a minimal Debian; needs root
	$(PYTHON) -B tests/newcomer/walk.py

wirecheck: $(READY) ## Run the wire's tests under every protobuf that agents may meet
	tests/wire_check.sh $(BIN)/python

golden: $(READY) ## Rewrite the golden outputs after a wanted change of the views
	UPDATE_GOLDEN=1 $(BIN)/pytest -n auto tests/integration/test_cli_golden.py tests/integration/test_verdict_golden.py

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
