# Two commands do everything: `make demo` and `make test`. `make cluster` gives a shell on the
# Slurm cluster of the tests.
#
# What is installed (PyTorch above all) lies outside of the checkout, keyed by what it is made
# of, so that a second clone starts in seconds; .venv only adds this checkout to it.
PYTHON ?= python3
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpc-ddp
KEY := $(shell { grep -E '^(requires|train|docs|dev|    ")' pyproject.toml; cat constraints.txt; \
	$(PYTHON) -VV; } | cksum | tr -c '0-9\n' '-')
DEPS := $(CACHE)/deps-$(KEY)
BIN := .venv/bin
# The tests mostly wait, for Slurm above all: twice as many processes as cores take tests from one
# list, each with a cluster of its own.
PARALLEL := --numprocesses=4 --maxschedchunk=1

.PHONY: demo test test-slurm lint types cluster docs bench soak constraints clean

demo: .venv/demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/demo.sh

test: .venv/ready lint types
	$(BIN)/python -m pytest $(PARALLEL) --durations=25

lint: .venv/ready
	$(BIN)/python -m ruff check

types: .venv/ready
	$(BIN)/python -m mypy hpc_ddp jobs tests/unit tests/cli
	$(BIN)/python -m mypy tests/ddp
	MYPYPATH=tests/slurm $(BIN)/python -m mypy tests/slurm bench

# The Slurm tests with the Slurm of another suite of Debian: bullseye has 20.11, trixie 24.11, sid
# the newest. It is fetched once, into $(CACHE).
SUITE ?= trixie
test-slurm: .venv/ready
	HPC_DDP_TEST_SLURM=$(SUITE) $(BIN)/python -m pytest tests/slurm -m "version or not soak" --durations=25

cluster: .venv/ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/slurm/cluster.py shell

# Every row of docs/bad-days.md, with the date's results, and the Slurm tests with each other
# version; two or three hours. 200 kills at random moments, of which `make test` does a dozen.
# Another HPC_DDP_SOAK_SEED, other moments.
soak: .venv/ready
	HPC_DDP_SOAK=200 HPC_DDP_FAULT_REPORT=docs/bad-days/faults-$$(date +%F).md \
		$(BIN)/python -m pytest -m "soak or row" --results docs/bad-days/$$(date +%F).md; \
		status=$$?; $(BIN)/python tests/unit/bad_days.py; \
		for suite in bullseye trixie sid; do $(MAKE) test-slurm SUITE=$$suite || status=1; done; \
		exit $$status

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --site-dir site

bench: .venv/ready
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/strategies.py

# The demo needs a part of what the tests need; the tests add theirs to it.
$(DEPS)/demo:
	@mkdir -p $(CACHE) && rm -rf $(DEPS)
	@$(PYTHON) tools/install.py $(DEPS) . hatchling numpy torch
	@$(DEPS)/bin/python -m pip uninstall --quiet --yes hpc-ddp
	@touch $@

$(DEPS)/tests: $(DEPS)/demo
	@$(PYTHON) tools/install.py $(DEPS) '.[test,docs,dev]'
	@$(DEPS)/bin/python -m pip uninstall --quiet --yes hpc-ddp
	@touch $@

# Renew the pinned versions: minutes, and the whole suite to be run afterwards.
constraints:
	$(PYTHON) tools/install.py --renew

.venv/ready: .venv/demo $(DEPS)/tests
	@touch $@

.venv/demo: $(DEPS)/demo pyproject.toml Makefile
	@rm -rf .venv && $(PYTHON) -m venv --without-pip .venv
	@$(DEPS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth
	@$(DEPS)/bin/python -m pip --python $(BIN)/python install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf .venv runs dist site
