# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
KILL_RANK ?=
SEED ?=
DEMO_ARGS ?=

.PHONY: demo test check unit chaos bench soak mutants proto clean help

help:
	@echo "make demo [KILL_RANK=0] [SEED=7]  train, kill a rank, recover, compare with an unbroken run"
	@echo "make test                         linters, types, every test"
	@echo "make chaos                        many real kills at random moments"
	@echo "make soak [SEED=0]                a hundred thousand simulated jobs, by seed"
	@echo "make mutants                      every small change of the protocol's machines, and which of them nobody notices"
	@echo "make bench                        benchmarks"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make: $(PYTHON) is Python %d.%d: wanted 3.11 or newer; run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(PY) -m ttp.chaos.demo $(if $(KILL_RANK),--kill-rank $(KILL_RANK)) $(if $(SEED),--seed $(SEED)) $(DEMO_ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: check
	$(PY) -m pytest tests

unit: $(STAMP)
	$(PY) -m pytest tests/unit tests/simulation

chaos: $(STAMP)
	@$(PY) -m ttp.chaos.kills $(if $(SEED),--seed $(SEED))

bench: $(STAMP)
	@$(PY) -m benchmarks

soak: $(STAMP)
	@$(PY) -m tests.simulation.replay $(if $(SEED),$(SEED),0) --count 100000 --keep-going

mutants: $(STAMP)
	@$(PY) -m tests.simulation.mutants

proto: $(STAMP)
	proto/generate.sh

clean:
	rm -rf $(VENV) output build dist *.egg-info
