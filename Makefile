# Every target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
KILL_RANK ?=
SEED ?=
COUNT ?=
KILLS ?=
BENCH ?=
DEMO_ARGS ?=
MATRIX_ARGS ?=
MATRIX_IN_PLACE_ARGS ?= $(MATRIX_ARGS)
PAIRS_ARGS ?=
FLAKY_ARGS ?=
FUZZ_ARGS ?=
DEVICE_FAULTS ?=
MUTANTS_ARGS ?=
SLOWEST := --durations=15 --durations-min=3
NEWEST := build/newest_torch
NEWEST_TESTS := tests/unit/launch/test_torch_names.py tests/chaos/test_other_trainers.py::test_plain_ddp_survives_the_death_of_rank_0 \
	tests/chaos/test_other_trainers.py::test_hsdp_survives_the_death_of_a_rank[0-updating]

# Thousands of processes are started: each would compile the package, and each pytest worker all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check unit chaos newest flaky bench soak mutants proto docs docs-site clean help

help:
	@echo "make demo [KILL_RANK=0] [SEED=7]  train, kill a rank, recover, compare with a baseline run"
	@echo "make test                         linters, types, every test but the long ones"
	@echo "make chaos [KILLS=20] [MATRIX_ARGS='--minutes 60']  the long tests, many real kills at random moments and the matrix of faults, by restart and in place"
	@echo "make newest                       the demo, DDP and FSDP2, one fault each, with the newest torch that pip gives (a part of make chaos)"
	@echo "make flaky [FLAKY_ARGS='--minutes 60']  every test with real processes ten times beside two busy ones; goes on where it was"
	@echo "make soak [SEED=0] [COUNT=1000000] [KILLS=300]  simulated jobs by seed, two faults of all kinds, bad input and attackers, faults on a device of threads, real kills by restart and in place"
	@echo "make mutants [MUTANTS_ARGS='--most 300']  the next 30 small changes of the machines, each in up to 20,000 random jobs; goes on where it was"
	@echo "make bench [BENCH='gate scale']   benchmarks"
	@echo "make docs                         the generated tables of docs/protocol.md and docs/architecture.md, and its picture"
	@echo "make docs-site                    the documentation as a site in build/site, every link checked"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make: $(PYTHON) is Python %d.%d: expected 3.11 or newer; run make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(PY) -m ttp.chaos.demo $(if $(KILL_RANK),--kill-rank $(KILL_RANK)) $(if $(SEED),--seed $(SEED)) $(DEMO_ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: check
	$(PY) -m pytest tests -m "not long" -n 6 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(SLOWEST)

unit: $(STAMP)
	$(PY) -m pytest tests/unit tests/simulation

chaos: $(STAMP)
	$(PY) -m pytest tests -m long
	@$(MAKE) --no-print-directory newest
	@$(PY) -m ttp.chaos.kills $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))
	@$(PY) -m ttp.chaos.kills --in-place --ranks 3 --output output/kills-in-place $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))
	@$(PY) -m ttp.cli chaos matrix $(MATRIX_ARGS)
	@$(PY) -m ttp.cli chaos matrix --in-place $(MATRIX_IN_PLACE_ARGS)

# In an environment of its own: all pinned versions but torch's.
newest:
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(NEWEST)/constraints.txt --upgrade torch --editable . \
		pytest pytest-timeout hypothesis
	$(NEWEST)/bin/python -m ttp.chaos.demo $(if $(SEED),--seed $(SEED)) --output output/demo_newest_torch
	$(NEWEST)/bin/python -m pytest $(NEWEST_TESTS)
	@$(NEWEST)/bin/python -c 'import torch; from ttp.torch_range import untested; print("passed with torch", torch.__version__, untested(torch.__version__))'

flaky: $(STAMP)
	@$(PY) -m tests.flaky $(FLAKY_ARGS)

bench: $(STAMP)
	@$(PY) -m benchmarks $(BENCH)

soak: $(STAMP)
	@$(PY) -m tests.simulation.soak $(if $(SEED),$(SEED),0) $(if $(COUNT),$(COUNT),1000000)
	@$(PY) -m tests.model.pairs $(PAIRS_ARGS)
	@$(PY) -m tests.model.pairs --in-place --most 300000 $(PAIRS_ARGS)
	@$(PY) -m tests.fuzz $(if $(SEED),$(SEED),0) $(FUZZ_ARGS)
	@$(PY) -m tests.device.campaign $(if $(SEED),$(SEED),0) $(if $(DEVICE_FAULTS),$(DEVICE_FAULTS),10000)
	@$(PY) -m ttp.chaos.kills --ranks 2 --kills $(if $(KILLS),$(KILLS),300) $(if $(SEED),--seed $(SEED))
	@$(PY) -m ttp.chaos.kills --in-place --ranks 3 --twice 6 --spare 0 --output output/kills-in-place --kills $(if $(KILLS),$(KILLS),300) $(if $(SEED),--seed $(SEED))

mutants: $(STAMP)
	@$(PY) -m tests.simulation.mutants.by_seeds $(MUTANTS_ARGS)

proto: $(STAMP)
	proto/generate.sh

docs: $(STAMP)
	@$(PY) -m tests.document
	@$(PY) -m tests.picture

docs-site: $(STAMP)
	$(PY) -m mkdocs build --strict
	@echo "built: build/site/index.html"

clean:
	rm -rf $(VENV) output build dist *.egg-info
