# Every habit has a target. `make` alone lists them.

VENV := .venv
RUN := $(VENV)/bin
PACKAGING := pyproject.toml requirements/installer.lock scripts/setup.sh

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-crash up test soak chaos bench conformance compose-test load check proto lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.runtime ## make .venv with what running needs, from requirements/runtime.lock

demo: setup ## run the example pipeline on an embedded PostgreSQL, start to finish
	@$(RUN)/rara dev demo

demo-crash: setup ## the same on more text, while executor and scheduler are killed
	@$(RUN)/rara dev demo --crash

up: setup ## database, scheduler and executor in this terminal, until Ctrl-C
	@$(RUN)/rara dev up

# The tests start a thousand processes: each module is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Files are dealt to so many processes, in their order: the short ones come last. Tests wait more than they compute: five
# suit two cores.
WORKERS := 5
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev ## all tests but the long ones; ARGS="..." goes to pytest
	@scripts/test.sh -m "not soak" $(PARALLEL) $(ARGS)

ROUNDS := 20
CHAOS = --duration $(or $(DURATION),60) $(if $(EVERY),--every $(EVERY)) $(if $(SEED),--seed $(SEED)) \
	$(if $(TARGET),--target $(TARGET)) $(if $(ADDRESS),--address $(ADDRESS))
chaos: setup ## a stack under load and random faults, then the verdict; DURATION=60 SEED=... TARGET=compose ADDRESS=...
	@$(RUN)/python -m rara_chaos $(CHAOS) $(ARGS)

soak: $(VENV)/.dev ## the long tests, then the fault tests ROUNDS times in a row (20)
	@scripts/soak.sh $(ROUNDS) $(PARALLEL) $(ARGS)

bench: ## product, physical limit and peers in turn, against the bars; ARGS="--only drain,limit --rounds 3"
	@scripts/bench.sh $(ARGS)

compose-test: $(VENV)/.dev ## images and compose file on a container engine, through kills, cuts and restarts
	@scripts/compose-test.sh $(ARGS)

load: $(VENV)/.dev ## a load on a running Rara, or on one of its own; ARGS="--stack --rate 50 --duration 30"
	@$(RUN)/python bench/load.py $(ARGS)

conformance: $(VENV)/.dev ## play the contract against our executors, both ways
	@scripts/conformance.sh

check: $(VENV)/.dev ## style, types, generated code, contract, migrations, known vulnerabilities
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	scripts/check-proto.sh
	scripts/check-sql.sh
	@if command -v go >/dev/null; then scripts/check-go.sh; \
	else echo "left out: go vet, gofmt, staticcheck: there is no \`go\` on the PATH"; fi
	@scripts/audit.sh

proto: $(VENV)/.dev ## generate gen/python and gen/go from api/proto
	scripts/proto.sh

# Run again when dependencies in pyproject.toml change; versions that still fit stay. UPGRADE=-U renews all.
LOCK := $(RUN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 \
	--no-emit-index-url --no-header --no-annotate $(UPGRADE)
lock: $(VENV)/.dev ## write the lock files in requirements/
	$(LOCK) requirements/installer.in -o requirements/installer.lock
	$(LOCK) pyproject.toml requirements/build.in --extra all -o requirements/runtime.lock
	$(LOCK) pyproject.toml requirements/build.in --extra all --extra speed --group dev \
		-c requirements/runtime.lock -o requirements/dev.lock
	$(LOCK) pyproject.toml requirements/build.in --extra all --extra speed --group bench \
		-c requirements/runtime.lock -o requirements/bench.lock

clean: ## remove what can be made again: environment, caches, the demo's data
	rm -rf $(VENV) .venv-bench .cache .rara .mypy_cache .ruff_cache .pytest_cache .hypothesis dist demo-result.json load-report.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.runtime: requirements/runtime.lock $(PACKAGING)
	scripts/setup.sh runtime

$(VENV)/.dev: requirements/dev.lock $(VENV)/.runtime
	scripts/setup.sh dev
