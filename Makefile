# Each target does all the set-up it needs: make demo in a fresh clone is enough.
# PYTHON=...   another interpreter, 3.11 or newer
# PIP_ARGS=... passed to pip, for example an index that has torch without CUDA

PYTHON ?= $(firstword $(foreach candidate,python3.11 python3.12 python3.13 python3.14 python3,$(shell \
	$(candidate) -c 'import sys; print("$(candidate)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
PIP_ARGS ?=
# Three at a time, for they often wait for a drive; each with one thread for its arithmetic. A file is
# one worker's, so that its set-up is made once; who is done takes the next one.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder --durations=15
BENCH_ARGS ?= --quick
BIN := .venv/bin
# Compiling all of torch and transformers takes longer than copying them, and most of it is never imported. What is imported is
# compiled then, and kept, which therefore must not be forbidden.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE
STYLE := $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
TYPES := $(BIN)/mypy --no-error-summary
READY := .venv/.ready-

.PHONY: help demo test lint bench venv oldest clean interpreter
.NOTPARALLEL:
.SECONDARY:

help:
	@echo "make demo    train a Llama eight times larger than its memory budget, on real text"
	@echo "make test    lint and all tests"
	@echo "make lint    ruff and mypy only"
	@echo "make bench   step time beside plain PyTorch (BENCH_ARGS='--quick' by default)"
	@echo "make oldest  the tests with the oldest libraries that pyproject.toml allows"
	@echo "make clean   remove what the others made"

# float32, because many processors have no instructions for bfloat16: it would take them hours.
demo: $(READY)hf
	$(BIN)/tiermem train --model llama-60m --host-memory 96MiB --steps 60 --batch 4 --seq 128 --lr 1e-3 --gradient-checkpointing \
		--param-dtype float32

test: $(READY)lint,test
	@echo "lint: ruff; and mypy, for half a minute the first time, beside what follows"
	@$(STYLE)
	@# What the tests import, and the tests, are compiled first, once, and not by each worker at the same time. What
	@# fails in that fails below, too, and says why there.
	@$(TYPES) & typing=$$!; \
		$(BIN)/python -c "import pytest; pytest.main(['--collect-only']); import doubles_python; doubles_python.prepare()" \
			> /dev/null; \
		echo "tests: pytest $(PYTEST_ARGS)"; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS); tested=$$?; \
		wait $$typing || { echo "mypy has found what is said above the tests" >&2; exit 1; }; exit $$tested

lint: $(READY)lint
	@echo "lint: ruff, and mypy for half a minute the first time"
	@$(STYLE) && $(TYPES)

bench: $(READY)hf
	$(BIN)/python benchmarks/train_step.py $(BENCH_ARGS)

venv: $(READY)lint,test

# In an environment of its own. What these libraries need themselves is the newest that they allow.
oldest:
	@.venv-oldest/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv-oldest
	@$(PYTHON) tools/oldest.py > .venv-oldest/constraints.txt
	@echo "installing into .venv-oldest: the oldest that are allowed"
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0 \
		--constraint .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[hf,plots,test]' \
		--constraint .venv-oldest/constraints.txt
	@OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(PYTEST_ARGS)

# An environment that is there already is of one interpreter; another that was asked for would silently not be used.
VERSION := -c 'import sys; print("Python %d.%d" % sys.version_info[:2])'
interpreter:
ifeq ($(origin PYTHON),command line)
	@test ! -e .venv/pyvenv.cfg || { has=`$(BIN)/python $(VERSION)`; asked=`$(PYTHON) $(VERSION)`; \
		test "$$has" = "$$asked" || { echo "make: .venv is of $$has, $(PYTHON) is not: make clean first" >&2; exit 1; }; }
endif

# What is needed for a target and no more: the extras of pyproject.toml named in the mark's name.
# torch first and by exact version: asked for with the rest, the resolver may fetch several builds of it.
$(READY)%: pyproject.toml constraints.txt | interpreter
	@if [ -z "$(PYTHON)" ]; then echo "make: no Python 3.11 or newer found; name one with PYTHON=..." >&2; exit 1; fi
	@echo "installing into .venv: torch (a large download, once)"
	@# Asked for pip: an environment whose making was broken off, or refused (Debian without python3-venv), has none.
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv .venv
	@$(PIP) torch==2.13.0
	@echo "installing into .venv: tiermem[$*]"
	@$(PIP) --editable '.[$*]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis tiermem-swap-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
