# Two commands do everything: `make demo` and `make test`. `make cluster` gives a shell on the
# Slurm cluster of the tests.
#
# What is installed (PyTorch above all) lies outside of the checkout, keyed by what it is made
# of, so that a second clone starts in seconds; .venv only adds this checkout to it.
PYTHON ?= python3
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpc-ddp
KEY := $(shell { sed -n '/^\[build/,/^$$/p; /^requires-/p; /^dependencies/,/^]/p; \
	/^\[project.opt/,/^\[project.scr/p' pyproject.toml; cat constraints.txt tools/install.py; \
	$(PYTHON) -VV; } | cksum | tr -c '0-9\n' '-')
# TORCH=2.9 takes that release in place of the pinned one, in an environment of its own.
DEPS := $(CACHE)/deps-$(KEY)$(TORCH:%=-torch-%)
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
# The tests mostly wait, for Slurm above all: more processes than cores take tests from one
# list, each with a cluster of its own.
PARALLEL := --numprocesses=5 --maxschedchunk=1

# Hundreds of processes start in the tests: each would compile what it imports. And Python is to
# print here as it does for users.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

.PHONY: demo test bytecode test-slurm test-device test-gpu lint types cluster docs bench test-more soak rehearse mutants flakes \
	device-faults programs constraints clean size coverage versions version

demo: $(VENV)/demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/demo.sh

test: $(VENV)/ready
	@$(MAKE) --no-print-directory --jobs=2 lint types bytecode
	$(BIN)/python -m pytest $(PARALLEL) --durations=25

# Compiled once, and not by each process that pytest starts at the same time.
bytecode: $(VENV)/ready
	@$(BIN)/python -m pytest --collect-only --quiet --quiet >/dev/null || true  # `test` shows why

lint: $(VENV)/ready
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check --quiet

# What mypy knows of torch serves all checkouts with these packages.
types: export MYPY_CACHE_DIR := $(DEPS)/mypy
types: $(VENV)/ready
	$(BIN)/python -m mypy hpc_ddp jobs tools tests/unit tests/cli
	$(BIN)/python -m mypy tests/ddp
	MYPYPATH=tests/slurm:bench/scale $(BIN)/python -m mypy tests/slurm bench
	MYPYPATH=tests/device $(BIN)/python -m mypy tests/device

# The Slurm tests with the Slurm of another suite of Debian: bullseye has 20.11, trixie 24.11, sid
# the newest. It is fetched once, into $(CACHE).
SUITE ?= trixie
test-slurm: $(VENV)/ready
	HPC_DDP_TEST_SLURM=$(SUITE) $(BIN)/python -m pytest tests/slurm $(PARALLEL) \
		-m "version or not more" --durations=25

# What trains, on an accelerator: DEVICE=sim, the stand-in of tests/device, or cuda, a machine's own.
test-device: export DEVICE ?= sim
test-device: $(VENV)/ready
	$(BIN)/python -m pytest tests/ddp tests/cli/test_drill.py tests/cli/test_dry_run.py \
		--numprocesses=2

# All that has a GPU to try, on a machine with some: the tests, each feature once, and the bench.
test-gpu: export DEVICE := cuda
test-gpu: test-device
	$(BIN)/hpc-ddp preflight --train
	$(BIN)/python bench/gpu.py --write \
		--workers $$($(BIN)/python -c 'import torch; print(torch.accelerator.device_count())')

cluster: $(VENV)/ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/slurm/cluster.py shell

# The tools below take hours, and go on where they were when they are called again; docs/testing.md.
# REPORT=1 shows what there is; DIRTY=1 tries uncommitted changes, and keeps nothing.
TOOL = PYTEST="$(BIN)/python -m pytest" PARALLEL="$(PARALLEL)" $(BIN)/python -m
TOOL_WORDS = $(if $(REPORT),--report) $(if $(DIRTY),--dirty)

# What is marked `more`: too long for `make test`; and all that trains, on the stand-in accelerator.
test-more: $(VENV)/ready
	@$(TOOL) tools.suites test-more $(TOOL_WORDS)

# Every row of docs/bad-days.md, with 200 kills at random moments, of which `make test` does eight
# (another HPC_DDP_SOAK_SEED, other moments); and the Slurm tests with each other version.
soak: $(VENV)/ready
	@$(TOOL) tools.suites soak $(TOOL_WORDS)

# Can the suite fail? N changes of a ROOM (node, slurm, core, training, essential, or a folder of hpc_ddp).
mutants: $(VENV)/ready
	@$(TOOL) tools.mutants --count $(or $(N),40) --seed $(or $(SEED),7) --room $(or $(ROOM),essential) \
		$(if $(SLURM),--slurm $(SLURM)) $(TOOL_WORDS)

# Public training programs, adopted, preempted and resumed: SOURCES has a clone of each (docs/testing.md).
programs: $(VENV)/ready
	@test -d "$(SOURCES)" || { echo "make programs: SOURCES=$(SOURCES) is no folder of clones; see docs/testing.md"; exit 2; }
	HPC_DDP_PROGRAMS="$(abspath $(SOURCES))" $(BIN)/python -m pytest tests/slurm/test_programs.py

# Do the tests on the stand-in accelerator notice device code that is gone? ALL=1: with more tests.
device-faults: $(VENV)/ready
	@$(TOOL) tools.device_faults $(if $(ALL),--all) $(TOOL_WORDS)

# A job of N nodes on this machine, and what each of them asks for: docs/scale.md.
rehearse: $(VENV)/ready
	$(BIN)/python bench/scale/rehearse.py --nodes $(or $(N),16) $(if $(CUT),--cut $(CUT))

# Which tests fail now and then? Each of tests/unit, cli and ddp N times, half of them under load.
flakes: $(VENV)/ready
	@$(TOOL) tools.flakes --count $(or $(N),20) $(if $(TEST),--test "$(TEST)") $(TOOL_WORDS)

# Which lines and branches of hpc_ddp run in the tests, also in the workers and jobs that they start.
# (Not those of a process that is killed.)
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/data
coverage: $(VENV)/ready
	@rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest $(PARALLEL)
	@$(BIN)/python -m coverage combine --quiet
	@{ git log -1 --format='%h of %cs'; $(BIN)/python -m coverage report; } > docs/results/coverage.txt
	@tail -1 docs/results/coverage.txt

# The oldest Python with the oldest torch, and the newest Python: each has an environment of its own.
versions:
	$(MAKE) version PYTHON=python3.10 TORCH=2.9 VENV=.venv-torch-2.9-py3.10
	$(MAKE) version PYTHON=python3.14 VENV=.venv-torch-py3.14

version: $(VENV)/ready
	$(BIN)/python -m pytest tests/unit tests/cli tests/ddp $(PARALLEL)

# How large the code is, room by room, and how many of its names say nothing.
size:
	@$(PYTHON) -m tools.size

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --site-dir site

bench: $(VENV)/ready
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/strategies.py

# The demo needs a part of what the tests need; the tests add theirs to it.
# Another checkout's make may install the same: it is waited for, by the lock.
INSTALL = $(PYTHON) tools/install.py $(DEPS) $(1) && \
	$(DEPS)/bin/python -m pip uninstall --quiet --yes hpc-ddp && touch $@
EXTRAS := $(if $(TORCH),'.[test]','.[test,docs,dev]')
TORCH_WORD := $(if $(TORCH),'torch==$(TORCH).*',torch)
# The pinned torchvision is for the pinned torch.
VISION_WORD := $(if $(TORCH),'torchvision!=$(shell sed -n "s/^torchvision==//p" constraints.txt)')
LOCKED = mkdir -p $(CACHE) && flock $(CACHE)/install.lock sh -ec

$(DEPS)/demo:
	@$(LOCKED) "[ -e $@ ] || { rm -rf $(DEPS); $(call INSTALL,. hatchling numpy $(TORCH_WORD)); }"

$(DEPS)/tests: $(DEPS)/demo
	@$(LOCKED) "[ -e $@ ] || { $(call INSTALL,$(EXTRAS) $(TORCH_WORD) $(VISION_WORD)); }"

# Renew the pinned versions: minutes, and the whole suite to be run afterwards.
constraints:
	$(PYTHON) tools/install.py --renew

$(VENV)/ready: $(VENV)/demo $(DEPS)/tests
	@touch $@

$(VENV)/demo: $(DEPS)/demo pyproject.toml Makefile
	@rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV)
	@$(DEPS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth
	@$(DEPS)/bin/python -m pip --python $(BIN)/python install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf .venv .venv-torch-* runs dist site
