# Eyas: `make quickstart` and `make test` do all set-up themselves. Needs Python >= 3.11, git, make, a C compiler.
#
#   make quickstart     install, then the whole way once: conversations -> served and measured drafter
#   make test           install, then every test
#   make install        only the environment, .venv
#   make clean          remove what the quickstart made (the environment stays)
#
# PYTHON=python3.12 picks the interpreter; PLATFORM=cpu installs the CPU packages even where a GPU is found.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON   ?= python3
VENV     ?= .venv
PLATFORM ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/installed-$(PLATFORM)
LISTS     := $(wildcard requirements/*$(PLATFORM)*.txt)
PINS      := $(patsubst %,-c %,$(filter requirements/constraints-%,$(LISTS)))

.PHONY: quickstart test install clean
.DELETE_ON_ERROR:

quickstart: $(INSTALLED)
	@$(BIN)/python launch/quickstart.py $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

install: $(INSTALLED)

clean:
	rm -rf outputs/quickstart

# The stamp is written last, so that an interrupted installation is taken up again by the next make.
# pip's whole output goes to install.log; the screen shows what is downloaded, built, or wrong.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
LOG := 2>&1 | tee -a $(VENV)/install.log | sed -un 's/^ *\(Downloading .*\|Building wheel for [^ ]*\) *.*/   \1/p; /^ *\(ERROR\|error\|×\|hint\)/p'

$(INSTALLED): pyproject.toml $(LISTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"error: Python 3.11 or newer is needed, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { echo "== making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing the $(PLATFORM) packages into $(VENV), once (a few minutes; all of it in $(VENV)/install.log)"
	@$(PIP) $(PINS) -r requirements/$(PLATFORM).txt $(LOG)
	@$(PIP) --no-deps -r requirements/$(PLATFORM)-no-deps.txt $(LOG)
	@$(PIP) --no-deps --no-build-isolation --editable . $(LOG)
	@date > $@
	@echo "== installed: $$(du -sh $(VENV) | cut -f1)"
