# The same commands here and in CI. Everything runs from .venv, which is made once and again when the dependencies change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# What must be installed again when it changes.
INPUTS := pyproject.toml src/rallypoint/_version.py
ARGS ?=
SEEDS ?= 0:20000
# Tests mostly wait, for leases and for processes: three at a time, whole files each.
WORKERS ?= 3
ROUNDS ?= 500
FAULTS ?= 100
KILLS ?= 50
FRAMES ?= 1000000
TIMES ?= 50
JUNK_MB ?= 100
SEED ?= 1
# How `make chaos` runs: ten minutes, or an hour with LONG=1; on tcp, etcd or both.
LONG ?=
BACKEND ?= both

.DEFAULT_GOAL := help
.PHONY: help setup check docs release test test-torch-slow test-etcd-slow bare demo bench sim fuzz crash losses chaos-etcd fmt clean test-run-slow test-jax scenarios chaos bench-parts closed
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Variables: ARGS="..." is passed on (test, demo, bench); PYTHON=... makes .venv with another Python, 3.11 or later.'

setup: $(VENV)/.stamp ## make .venv with the package and the development tools

check: setup ## formatting, lint, types and the shape of the architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest -q tests/tidy $(ARGS)

test: setup $(VENV)/.stamp-torch $(VENV)/.stamp-system ## run all tests; ARGS="-k name -x" to choose
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-torch-slow: setup $(VENV)/.stamp-torch ## the long tests of torchrun: minutes
	$(BIN)/python -m pytest -m slow tests/integrations $(ARGS)

test-etcd-slow: setup $(VENV)/.stamp-torch $(VENV)/.stamp-system ## the long tests of etcd: minutes
	$(BIN)/python -m pytest -m slow tests/backends/etcd tests/e2e tests/bench $(ARGS)

test-run-slow: setup $(VENV)/.stamp-system ## the long tests of rallypoint run: minutes
	$(BIN)/python -m pytest -m slow tests/e2e/test_run.py tests/e2e/test_run_scenarios.py $(ARGS)

test-jax: $(VENV)/jax/.stamp ## the tests of JAX, with a .venv of their own (650 MB): a minute
	$(VENV)/jax/bin/python -m pytest tests/integrations/test_jax.py $(ARGS)

scenarios: setup $(VENV)/.stamp-torch $(VENV)/.stamp-system ## what hurts users, played with real processes: writes docs/scenarios.md; half an hour
	$(BIN)/python -m pytest -m scenarios tests/scenarios $(ARGS)

bare: $(VENV)/bare/.stamp ## see that it works with nothing but what it always needs
	$(VENV)/bare/bin/python examples/bare.py

demo: $(VENV)/.stamp-runtime ## an elastic job on four nodes of this machine: one is killed, one is added
	$(BIN)/python examples/demo.py $(ARGS)

bench: setup $(VENV)/.stamp-torch ## measure it beside its competitors and make docs/benchmarks.md: 28 minutes, ARGS=--quick: 8
	$(BIN)/python -m bench.suite $(if $(wildcard $(VENV)/jax/bin/python),--jax-python $(VENV)/jax/bin/python) $(ARGS)

bench-parts: $(VENV)/.stamp-runtime ## measure its parts: the engine, torchrun, the register backend, watchers, the page
	$(BIN)/python bench/run.py $(ARGS)

sim: $(VENV)/.stamp-runtime ## simulate worlds and check every guarantee; SEEDS=A:B to choose
	$(BIN)/rallypoint sim --seeds $(SEEDS) --all-marks $(ARGS)

fuzz: setup ## a real server under mutated frames and junk; FRAMES=n JUNK_MB=n SEED=n to choose: minutes
	$(BIN)/python -m tests.fuzz.campaign --frames $(FRAMES) --junk-mb $(JUNK_MB) --seed $(SEED)

closed: setup $(VENV)/.stamp-torch ## close a run and lose its host, with each face; TIMES=N to choose: half an hour
	$(BIN)/python -m tests.e2e.closed --times $(TIMES) $(ARGS)

crash: setup ## kill a server with data under load and audit what it says; ROUNDS=N to choose: 20 minutes
	$(BIN)/python -m tests.e2e.crash --rounds $(ROUNDS) $(ARGS)

chaos: setup $(VENV)/.stamp-system ## random faults against real processes; SEED=N BACKEND=tcp|etcd|both: 10 minutes, an hour with LONG=1
	$(BIN)/python -m tests.chaos.campaign --seed $(SEED) --backend $(BACKEND) --minutes $(if $(LONG),60,10) $(ARGS)

losses: setup $(VENV)/.stamp-torch $(VENV)/.stamp-system ## lose launchers whose workers communicate: no job may end; KILLS=N SEED=N BACKEND=tcp|etcd|both: hours
	$(BIN)/python -m tests.e2e.losses --kills $(KILLS) --seed $(SEED) --backend $(BACKEND) $(ARGS)

chaos-etcd: setup $(VENV)/.stamp-system ## faults against a run on a real etcd cluster; FAULTS=N, SEED=N
	$(BIN)/python -m tests.e2e.etcd_faults --faults $(FAULTS) --seed $(SEED) $(ARGS)

docs: setup ## build the documentation as a site; a link that leads nowhere is an error
	$(BIN)/python tools/site.py

release: setup ## build the sdist and the wheel, install them in clean environments, use them: minutes
	$(BIN)/python tools/release.py

fmt: setup ## format the code and repair what lint can repair
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove .venv and everything that was generated
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The CPU build of the version that the torchrun backend is tested with. Not an extra: which build is the user's choice.
$(VENV)/.stamp-torch: | $(VENV)/.stamp
	$(PIP) install 'torch==2.13.0' 'python-etcd==0.4.5'
	@touch $@

$(VENV)/bare/.stamp: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/bare
	$(VENV)/bare/bin/python -m pip --disable-pip-version-check --quiet install --editable .
	@touch $@

# Beside what the others use: it is large, and nothing but its own tests needs it.
$(VENV)/jax/.stamp: $(INPUTS) | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/jax
	$(VENV)/jax/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[jax]' pytest hypothesis
	@touch $@

# Tests of several machines need network namespaces, those of etcd an etcd, which must not be started as a service, those of the page a browser.
# Without root they are skipped, by name.
$(VENV)/.stamp-system: | $(BIN)/python
	@command -v etcd >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq etcd-server; } || echo "note: no 'etcd' (package etcd-server): tests of etcd are skipped"
	@command -v ip >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq iproute2; } || echo "note: no 'ip' (package iproute2): tests of several machines are skipped"
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } || echo "note: no 'chromium': tests of the web page in a browser are skipped"
	@ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libfaketime; } || echo "note: no libfaketime: 'make chaos' cannot run"
	@command -v tmux >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq tmux; } || echo "note: no 'tmux': tests of the terminal are skipped"
	@command -v faketime >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq faketime; } || echo "note: no 'faketime': the scenario of clocks that differ is skipped"
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' found; install Python 3.11 or later, or say PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "error: Rallypoint needs Python 3.11 or later, and $(PYTHON) is %d.%d; say PYTHON=/path/to/python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-runtime: $(INPUTS) | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.stamp-runtime $@
