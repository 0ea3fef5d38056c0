# The commands of this project; `make help` lists them. Everything is installed into .venv and nowhere else.
# Another interpreter: make PYTHON=python3.12 ...      Extra arguments of a run: make quickstart ARGS="--config.seed=1"

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11 python; do \
	$$p -c '$(FITS)' 2> /dev/null && echo $$p && break; done)
# jax 0.10 on Python 3.11, jax 0.12 from 3.12 on: each has its own tested set of versions.
PINS = constraints-$(shell $(BIN)/python -c 'import sys; print("3.11" if sys.version_info < (3, 12) else "3.12")').txt
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart maze test learning parity clients vendors worlds check clean
.DEFAULT_GOAL := help

help:  ## lists these commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

quickstart: $(VENV)/core  ## trains a small policy to use tools, on two CPU cores, about 3 minutes
	$(BIN)/jaxagent train --config=configs/quickstart.py --workdir=runs/quickstart $(ARGS)

maze: $(VENV)/core  ## the smoke test: a smaller policy, sparse reward, under two minutes
	$(BIN)/jaxagent train --config=configs/maze.py --workdir=runs/maze $(ARGS)

test: $(VENV)/dev  ## the test suite; ten to fifteen minutes on two cores, less once its programs are compiled
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadfile $(ARGS)

learning: $(VENV)/dev  ## policies that must learn, and must not without what they are said to learn from
	$(BIN)/python -m pytest -m learning -n auto --maxprocesses=4 $(ARGS)

parity: $(VENV)/parity  ## compares logits, gradients and rendered chats with transformers under torch
	$(BIN)/python -m pytest -m parity $(ARGS)

# Each in an environment of its own, since they want different versions of openai. What they share lies in .venv already.
# A test that skips there because something is not installed has failed.
OUTSIDE = JAXAGENT_ALL_INSTALLED=1
clients: $(VENV)/clients/done $(VENV)/agents/done  ## the clients, loggers and agent frameworks that others make, against ours
	$(OUTSIDE) $(VENV)/clients/bin/python -m pytest -rs tests/test_serve_clients.py tests/test_endpoint_foreign.py \
		tests/test_echoes.py $(ARGS)
	$(OUTSIDE) $(VENV)/agents/bin/python -m pytest -rs tests/test_programs_frameworks.py $(ARGS)
	$(OUTSIDE) $(VENV)/agents/bin/python -m pytest -rs -m learning tests/test_learning_frameworks.py $(ARGS)

vendors: $(VENV)/vendors/done $(VENV)/prime/done  ## the sandbox's adapters against the services' own clients and servers, where they run offline
	$(OUTSIDE) $(VENV)/vendors/bin/python -m pytest -rs tests/sandbox_client/test_vendor_clients.py \
		tests/sandbox_client/test_conformance.py tests/sandbox_client/test_backends.py tests/envs/test_openenv.py \
		tests/toolbox/test_model_context.py tests/data/test_records.py -k "not prime_s_messages" $(ARGS)
	$(OUTSIDE) $(VENV)/prime/bin/python -m pytest -rs tests/sandbox_client/test_vendor_clients.py -k prime_s_messages $(ARGS)

# Installs every world that is wanting here: with Java, Chromium, Xvfb and xdotool, cmake and a C++ compiler, Pythons 3.11 and 3.12,
# all of them. A world that lacks one of the first four skips its tests and says so; one that could not be installed fails them.
worlds: export JAXAGENT_ENVS = $(CURDIR)/$(VENV)/worlds
worlds: $(VENV)/dev $(VENV)/vendors/done  ## the worlds that others make, each in an environment of its own; 6 GB
	-$(BIN)/jaxagent env list | sed -n 's/.*; run: jaxagent env install \([a-z_]*\).*/\1/p' | \
		xargs -r -n 1 $(BIN)/jaxagent env install
	$(BIN)/jaxagent env list
	$(OUTSIDE) OPENENV_PYTHON=$(CURDIR)/$(VENV)/vendors/bin/python $(BIN)/python -m pytest -rs tests/envs/test_libraries.py \
		tests/envs/test_gem.py tests/envs/test_alfworld.py tests/envs/test_debug_gym.py tests/envs/test_desk.py \
		tests/envs/test_browsers.py tests/envs/test_openenv.py $(ARGS)

check: $(VENV)/dev  ## format, lint, types, and the rules of the house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/house_test.py

clean:  ## removes the environment and all caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './runs/*' -prune -exec rm -rf {} +

$(VENV)/python:
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(FITS)' 2> /dev/null; then \
		echo "jaxagent needs Python 3.11, 3.12 or 3.13; found: $$($(or $(PYTHON),python3) --version 2>&1 | head -1)." \
			"Install one of them, or name it: make PYTHON=/path/to/python3.12"; exit 1; fi
	@echo "setting up $(VENV) with $$($(PYTHON) --version): about a minute and 1 GB"
	@$(PYTHON) -m venv $(VENV) || { echo "this Python has no venv module; on Debian: apt install python3-venv"; exit 1; }
	@touch $@

$(VENV)/core: $(VENV)/python pyproject.toml constraints-3.11.txt constraints-3.12.txt
	@echo "installing jaxagent and what it needs"
	@$(PIP) -c $(PINS) -e .
	@touch $@

$(VENV)/dev: $(VENV)/core
	@echo "installing what tests and checks need"
	@$(PIP) -c $(PINS) -e ".[test,check]"
	@touch $@

$(VENV)/clients/done: EXTRAS = test,clients,servers,loggers
$(VENV)/agents/done: EXTRAS = test,agents
$(VENV)/vendors/done: EXTRAS = test,vendors
$(VENV)/prime/done: EXTRAS = test,prime
$(VENV)/clients/done $(VENV)/agents/done $(VENV)/vendors/done $(VENV)/prime/done: $(VENV)/dev
	@echo "installing $(EXTRAS): some minutes"
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@grep -vE '^(mcp|mcp-types|pyarrow)==' $(PINS) > $(@D)/pins.txt  # which some of them want other versions of
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/pins.txt -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/parity: $(VENV)/dev
	@echo "installing torch, the reference: some minutes"
	@$(PIP) -c $(PINS) -e ".[parity]"
	@$(PIP) --no-deps trl==1.16.0  # for the chat templates in it: it is never imported
	@$(PIP) --no-deps peft==0.21.2 accelerate==1.15.0  # loads the adapters that we write
	@touch $@
