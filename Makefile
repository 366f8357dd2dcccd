# The two commands of a newcomer are `make demo` and `make test`; each sets up by itself what it needs (see scripts/setup.py).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# One thread per rank, so that ranks do not fight for cores; nothing from the user's site-packages or PYTHONPATH.
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME
# Set-up leaves bytecode to the first import. Were it never written, every rank of every job would compile TensorFlow.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test bench docs lint format clean

help:
	@echo "make demo     two ranks, one of them slowed down: what load balancing gains"
	@echo "make test     everything that continuous integration runs"
	@echo "make bench    the plugin's own cost, against stock Horovod"
	@echo "make docs     the documentation as a site, in site/"
	@echo "make lint     ruff and mypy        make format   let ruff rewrite"
	@echo "make setup    only the environment in .venv"
	@echo "make clean    remove .venv and everything generated (the cached wheel of Horovod stays)"

setup:
	@"$(PYTHON)" scripts/setup.py

# make demo SLOW=3 slows the last rank to a third; make demo FRAMEWORK=keras trains with Keras
demo:
	@"$(PYTHON)" scripts/setup.py $(if $(filter keras,$(FRAMEWORK)),,torch)
	@$(BIN)/python examples/demo.py $(if $(SLOW),--slow $(SLOW)) $(if $(FRAMEWORK),--framework $(FRAMEWORK))

test: setup
	@$(BIN)/python scripts/run_tests.py

bench: setup
	@$(BIN)/python benchmarks/overhead_torch.py

docs:
	@"$(PYTHON)" scripts/build_docs.py

lint: setup
	@$(BIN)/python scripts/run_tests.py lint types

format: setup
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

clean:
	rm -rf .venv .setup out site build dist *.egg-info packaging/horovod/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
