# Every target makes its own virtual environment first; Python 3.11 or newer is all it needs.

PYTHON ?= python3
VENV   ?= .venv
SEEDS  ?= 20000
TAKEOVERS ?= 100000
RUNS   ?= 30
KILLS  ?= 200
TIMES  ?= 10
LOAD   ?= 4
TESTERS ?= 3
BENCH  ?=
PYTEST ?=
TORCH  ?=
TORCH_SOURCE ?=

# TESTERS: processes that run tests. Most of a test of processes is waiting.
# TORCH_SOURCE=DIR: also torch's tests that lie in a checkout of PyTorch only.
SOURCE := $(if $(TORCH_SOURCE),--torch-source $(TORCH_SOURCE))

# TORCH=2.15.0: an environment of its own, and the tests of all that touches torch.
ifneq ($(TORCH),)
VENV        := .venv-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
TORCH_TESTS := tests/worker tests/end_to_end tests/checkpoint tests/launch
else
CONSTRAINTS := constraints.txt
endif

BIN   := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
COMPARE := .venv-compare
READY := $(VENV)/.ready

# pyright runs on the Node.js that pip installed and asks no network whether a newer one exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

# Hundreds of processes import the same files: they are compiled once, whatever this shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-cluster test extended frameworks scripts cluster-test cluster-scripts docs gpu conformance flaky check lint format types bench compare soak judge clean

help:
	@echo "make demo    train a small GPT while it is killed, stopped and broken; compare with its twin"
	@echo "make demo-cluster  the same on three hosts and a spare (namespaces; needs root), two of which fail"
	@echo "make test    lint, format, types, and every test"
	@echo "             TORCH=2.15.0: what touches torch, on that release in an environment of its own"
	@echo "make extended  more real runs, which 'make test' has no time for"
	@echo "make frameworks  Lightning, Hugging Face's Trainer and streams of other libraries, which it installs"
	@echo "make scripts kinds of training scripts, undisturbed and with faults, against plain torchrun"
	@echo "make cluster-test  hosts as network namespaces, and a real Slurm on them; needs root"
	@echo "make cluster-scripts  scripts of the catalogue on hosts that lose power, and long races; needs root"
	@echo "make docs    the documentation in docs/_build/html, every code block of it, every example"
	@echo "make gpu     tests and benchmark of a GPU; docs/gpu-runs.md then says what ran on which versions"
	@echo "make conformance  torch's own tests of a backend, on gloo and on ours, and with killed ranks"
	@echo "             TORCH_SOURCE=DIR: also those in a checkout of PyTorch"
	@echo "make flaky   the suite TIMES=$(TIMES) times beside LOAD=$(LOAD) busy processes: what failed at least once"
	@echo "make check   lint, format, types"
	@echo "make format  put the code into its format"
	@echo "make bench   recovery, overhead, checkpoints, copies, planning  (BENCH='--repeats 3')"
	@echo "make compare torchft, NVRx, torchrun with DCP and Outlast, with the same faults (25 minutes)"
	@echo "make soak    random fault schedules                   (SEEDS=$(SEEDS) simulated, RUNS=$(RUNS) real)"
	@echo "             and takeovers of the controller          (TAKEOVERS=$(TAKEOVERS) simulated)"
	@echo "             and SIGKILLs while saving                (KILLS=$(KILLS))"
	@echo "make judge   ckpt-chaos, an outside judge of saves that are killed; asks PyPI for it"
	@echo "make clean   remove the environment, caches and runs"

# Modules are compiled at their first import: compiling all that pip installs takes a minute.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Outlast needs Python 3.11 or newer, and '$(PYTHON)' is not;" \
	       "name one that is: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' cannot make virtual environments (on Debian and Ubuntu:" \
	       "apt install python3-venv), or name another: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH),)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS)
endif
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	  -e '.[run,figures,objects,plan,dask,fleet,health,view,metrics,otlp,dev,docs]' -c $(CONSTRAINTS)
	@touch $@

demo: $(READY)
	$(BIN)/outlast demo

demo-cluster: $(READY)
	$(BIN)/python -m tests.cluster.demo

check: lint types
	$(BIN)/python tests/tidy/structure.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

ifeq ($(TORCH),)
test: check
	$(BIN)/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal $(PYTEST)
else
test: $(READY)
	$(BIN)/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal $(TORCH_TESTS) $(PYTEST)
endif

extended: $(READY)
	$(BIN)/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal -m 'extended and not long and not cluster' $(PYTEST)

# An environment over that of the tests, whose packages it sees: torch is installed once.
$(FRAMEWORKS)/.ready: $(READY) tests/integrations/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	@$(BIN)/python -c 'import sysconfig; site = sysconfig.get_path("purelib"); \
	  print(f"import site; site.addsitedir({site!r})")' > $(FRAMEWORKS)/base.pth
	@mv $(FRAMEWORKS)/base.pth $(FRAMEWORKS)/lib/python*/site-packages/
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
	  -r tests/integrations/requirements.txt -c constraints.txt
	@touch $@

frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal -m 'not long' \
	  tests/integrations $(PYTEST)

scripts: $(READY)
	$(BIN)/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal -m 'not long' tests/scripts $(PYTEST)

# Hosts share one name space of networks on this machine: one process runs them. Tests of Slurm
# and etcd are skipped, visibly, where these are not installed and cannot be.
cluster-test: $(READY)
	@mkdir -p runs
	@{ command -v slurmctld && command -v munged && command -v etcd; } > /dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -q \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q slurm-wlm munge iproute2 etcd-server; \
	} > runs/slurm-packages.log 2>&1 || echo "NOT INSTALLED: Slurm, etcd; see runs/slurm-packages.log"
	$(BIN)/python -m pytest -m 'cluster and not catalogue and not extended' tests/cluster $(PYTEST)

cluster-scripts: $(READY)
	$(BIN)/python -m pytest -m 'cluster and (catalogue or extended)' tests/cluster $(PYTEST)

# Sphinx turns warnings into errors. Then each code block and each example is executed.
docs: $(READY)
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	$(BIN)/python -m pytest --numprocesses=$(TESTERS) --dist=worksteal -m documentation \
	  tests/documentation tests/examples $(PYTEST)

gpu: $(READY)
	@failed=0; $(BIN)/python -m pytest tests/gpu --record docs/gpu-runs.md $(PYTEST) || failed=1; \
	  $(BIN)/python benchmarks/gpu.py --record docs/gpu-runs.md $(BENCH) || failed=1; exit $$failed

conformance: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check expecttest
	$(BIN)/python conformance/compare.py --json runs/conformance.json $(SOURCE)
	$(BIN)/python conformance/killed_ranks.py --tests runs/conformance.json $(SOURCE)

flaky: $(READY)
	$(BIN)/python tests/soak/flaky_tests.py --times $(TIMES) --load $(LOAD)

bench: $(READY)
	@missed=0; for each in recovery start chaos overhead audit checkpoint peers plan; do \
	  $(BIN)/python benchmarks/$$each.py $(BENCH) || missed=1; done; exit $$missed

# NVRx has wheels for newer systems only. On CPUs its Python alone runs, which any system takes.
$(COMPARE)/.ready: pyproject.toml constraints.txt benchmarks/rivals/requirements.txt
	$(PYTHON) -m venv $(COMPARE)
	$(COMPARE)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[run,figures]' -r benchmarks/rivals/requirements.txt -c constraints.txt
	$(COMPARE)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
	  --only-binary=:all: --platform manylinux_2_39_x86_64 nvidia-resiliency-ext==0.6.0 --target \
	  "$$($(COMPARE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

compare: $(COMPARE)/.ready
	$(COMPARE)/bin/python benchmarks/compare.py $(BENCH)

soak: $(READY)
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m outlast.testing.soak --seeds $(SEEDS)
	$(BIN)/python -m outlast.testing.soak --takeovers --seeds $(TAKEOVERS)
	$(BIN)/python -m outlast.testing.soak --undisturbed --seeds $(SEEDS)
	$(BIN)/python tests/soak/save_kills.py --kills $(KILLS)
	$(BIN)/python tests/soak/fault_schedules.py --runs $(RUNS)

# What did "not crash" there was a keeper that was replaced; names differ ("drift") by the attempt.
judge: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ckpt-chaos==0.1.8
	$(BIN)/ckpt-chaos run --modes before --step-regex 'resumed from step (\d+)' \
	  --result-cmd '$(BIN)/python tests/soak/judged_training.py --show {out}' \
	  --work "$$(mktemp -d)/judged" -- $(BIN)/python tests/soak/judged_training.py {out}

clean:
	rm -rf $(VENV) .venv-torch-* $(FRAMEWORKS) $(COMPARE) runs dist docs/_build docs/reference/commands .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
