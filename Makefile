# make demo | test | check | cluster-up | cluster-down. Needs Debian's python3 (3.11 or newer); the rest is installed here.
SHELL := /bin/bash
VENV := .venv
PYTHON ?= python3
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check cluster-up cluster-down clean

demo: $(STAMP)
	"$(BIN)/launch" configs/quickstart.yaml executor=local
	@echo; echo "To use launch in this shell: source $(VENV)/bin/activate"

test: $(STAMP)
	"$(BIN)/python" -m pytest $(ARGS)

check: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"

cluster-up: $(STAMP)
	"$(BIN)/python" slurm/cluster.py up $(ARGS)

cluster-down:
	"$(BIN)/python" slurm/cluster.py down

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

# The folder's own venv, brought up to date when what it should hold has changed. Debian ships venv in a package of its own.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed; give one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
	  else echo "make: $(PYTHON) has no venv module; install it first: sudo apt-get install python3-venv" >&2; exit 1; fi; }
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[examples,dev]'
	touch $(STAMP)
