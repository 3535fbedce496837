# Each target makes its virtual environment first, so that a fresh machine needs
# nothing but Python. PYTHON=... chooses the interpreter, VENV=... the folder.
PYTHON ?= $(shell bash .ci/find_python 3.11 3)
VENV ?= .venv
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
DEMO_STAMP := $(VENV)/.installed-demo
COMPILERS_STAMP := $(VENV)/.installed-compilers
RUN := $(VENV)/bin/python -m
SHELL := bash

.PHONY: help demo test test-deep compilers explained docs site lint types format bench dist clean

help:
	@echo "make demo    train a digit classifier over 8 virtual devices"
	@echo "make test    run the tests (ARGS='-k name' to choose, ARGS='-n 0' for one process)"
	@echo "make test-deep  run what 'make test' leaves out, with many more random programs"
	@echo "make compilers  compile every feature for TPUs and GPUs that need not be here"
	@echo "make explained  hold explain against the compiled text of the tests' own programs"
	@echo "make docs    run the examples of README.md, of docs/ and of the docstrings"
	@echo "make site    build the pages of docs/ into build/site"
	@echo "make lint    check style and format ('make format' mends them)"
	@echo "make types   check the types"
	@echo "make bench   time shardmap against JAX, side by side (ARGS='--plot' draws it)"
	@echo "make dist    build a release into dist/ and check it in an empty environment"
	@echo "make clean   remove what the other targets made"

# Each extra has a stamp of its own: the demo needs little, the tests more, and whoever
# builds the site, checks types or runs all tests needs everything.
$(STAMP): EXTRA := test
$(DEV_STAMP): EXTRA := dev
$(DEMO_STAMP): EXTRA := demo
$(STAMP) $(DEV_STAMP) $(DEMO_STAMP): setup.py
	@test -n "$(PYTHON)" || { echo "shardmap needs Python 3.11 or later with the venv module" >&2; exit 1; }
	@echo "Installing into $(VENV) with $(PYTHON); this happens once."
	@"$(PYTHON)" -m venv $(VENV)
	@set -o pipefail; \
	$(RUN) pip install --disable-pip-version-check --editable '.[$(EXTRA)]' \
	  --config-settings editable_mode=compat | \
	awk '/^(Collecting|Processing)/ { \
	  sub(".*/", "", $$2); sub(/-[0-9].*|[^[:alnum:]_-].*/, "", $$2); printf "%s ", $$2; fflush() \
	} END { print "" }'
	@touch $@ $(if $(filter dev,$(EXTRA)),$(STAMP))

demo: $(DEMO_STAMP)
	@$(RUN) shardmap demo

# Workers begin with a half of the tests each, so that those of one file share fixtures.
PYTEST := $(RUN) pytest -n auto --maxprocesses 8 --dist worksteal

test: $(STAMP)
	@$(PYTEST) $(ARGS)

test-deep: $(DEV_STAMP)
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-deep} $(PYTEST) -m "deep or hypothesis" $(ARGS)

$(COMPILERS_STAMP): $(STAMP)
	@echo "Installing the compilers of TPUs and GPUs, about 350 MB; this happens once."
	@$(RUN) pip install -q --disable-pip-version-check -e '.[tpu-compiler,gpu-compiler]' \
	  --config-settings editable_mode=compat
	@touch $@

compilers: $(COMPILERS_STAMP)
	@$(RUN) pytest -n 2 tests/compilers $(ARGS)

explained: $(DEV_STAMP)
	@$(RUN) pytest -q -n 0 -p tests.explain.caught $(or $(ARGS),tests)

docs: $(STAMP)
	@$(RUN) pytest tests/test_docs.py tests/test_readme.py $(ARGS)

site: $(DEV_STAMP)
	@$(RUN) sphinx --fail-on-warning --keep-going -q docs build/site
	@echo "The site begins at build/site/index.html"

lint: $(DEV_STAMP)
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

format: $(DEV_STAMP)
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

types: $(DEV_STAMP)
	@$(RUN) mypy

bench: $(DEV_STAMP)
	@$(RUN) benchmarks $(ARGS)

dist: $(DEV_STAMP)
	@rm -rf build/lib build/bdist.* dist
	@$(RUN) build --outdir dist .
	@$(VENV)/bin/python .ci/check_dist dist

clean:
	rm -rf .venv .venv-newest .venv-nightly build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
