# make demo   set up .venv and train a small capsule network for about two minutes
# make test   set up .venv, then lint, type-check and run the whole test suite
# make docs   set up .venv and build the documentation site into build/site, without a network
# make notebooks   make the notebooks of examples/ and run them
# make dist   set up .venv and build the sdist and the wheel into dist/
# make test-lowest           the tests that need no Triton, with the oldest versions of all dependencies, in .venv-lowest
# make test-triton-versions  every Triton kernel, compiled by the oldest and by the newest Triton; no GPU is needed
# make test-without-triton   the tests that need no Triton, for macOS
# make bench  measure the quick suite and write docs/benchmarks.md from it
# make experiments  the papers' experiments in their quick form, and the pictures of docs/experiments.md; needs MNIST
# make fuzz   call the public functions 20,000 times with random, mostly wrong arguments
# make soak   train for 2,000 steps on random shapes and check the memory
# They work in a new clone with Python 3.10 to 3.13 and make, and use .venv if it exists.

PYTHON ?= python3
RUN := .venv/bin/python

# torch's threads sleep while they wait, as with the command `tritoncaps`; see docs/backends.md.
export OMP_WAIT_POLICY ?= PASSIVE

# The name of the stamp depends on the folder and on the dependencies: if one of them changes, make installs again.
STAMP := .venv/installed-$(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | tr ' ' '-')

.PHONY: demo test lint typecheck joined pytest docs notebooks dist test-lowest test-triton-versions test-without-triton bench experiments fuzz soak clean

demo: $(STAMP)
	$(RUN) -m tritoncaps.demo

test: lint typecheck docs pytest

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Type checkers and the documentation need the package as it is installed: kernels/ and models/ inside of tritoncaps.
joined:
	@mkdir -p build/typed/tritoncaps
	@ln -sfn $(CURDIR)/tritoncaps/* $(CURDIR)/kernels $(CURDIR)/models build/typed/tritoncaps/
	@ln -sfn $(CURDIR)/tritoncaps_command.py $(CURDIR)/tests/types_of_calls.py build/typed/

typecheck: $(STAMP) joined
	cd build/typed && ../../$(RUN) -m mypy --config-file ../../pyproject.toml -p tritoncaps -m tritoncaps_command -m types_of_calls
	$(RUN) -m basedpyright -p pyproject.toml --pythonpath $(RUN)

pytest: $(STAMP)
	$(RUN) -m pytest -n 2 --dist worksteal

docs: $(STAMP) joined
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

notebooks: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	$(RUN) examples/make_notebooks.py

dist: $(STAMP)
	$(RUN) -m build --no-isolation --outdir dist .
	$(RUN) -m twine check --strict dist/*

# The test files that do not contain the word triton.
WITHOUT_TRITON = $(shell grep -Lw triton tests/test_*.py)

# The oldest versions of all dependencies, in a separate environment. Triton 3.4 compiles all kernels (test-triton-versions),
# but its interpreter does not run all of them, so the tests of these kernels are left out.
test-lowest:
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[train,testing,triton]' pytest pytest-xdist
	.venv-lowest/bin/python -m pytest -n 2 --dist worksteal $(WITHOUT_TRITON)

# Compile every kernel with the oldest and the newest Triton of the package index, each in its own folder.
test-triton-versions: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target build/triton-oldest 'triton==3.4.*'
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target build/triton-newest triton
	PYTHONPATH=build/triton-oldest $(RUN) -m tritoncaps.kernels.common.triton.resources --any-compiler
	PYTHONPATH=build/triton-newest $(RUN) -m tritoncaps.kernels.common.triton.resources --any-compiler

test-without-triton: $(STAMP)
	$(RUN) -m pytest -n 2 --dist worksteal $(WITHOUT_TRITON)

bench: $(STAMP)
	$(RUN) bench/suite.py --quick --page docs/benchmarks.md

# one after the other; results are saved, so that an interrupted make can be continued
experiments: $(STAMP)
	for name in $$($(RUN) -m tritoncaps experiment list | cut -d' ' -f1); do \
		$(RUN) -m tritoncaps experiment $$name --quick || exit 1; \
	done
	$(RUN) -m tritoncaps.experiments.gallery runs/experiments docs/experiments

fuzz: $(STAMP)
	$(RUN) tests/fuzz.py --examples 20000
	$(RUN) tests/fuzz.py --examples 1000 --backend triton

soak: $(STAMP)
	$(RUN) tests/soak.py --steps 2000

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0) if (3, 10) <= sys.version_info[:2] < (3, 14) else sys.exit("tritoncaps needs Python 3.10 to 3.13, but $(PYTHON) is Python " + sys.version.split()[0] + "; name another one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	@test -x $(RUN) || $(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f .venv/installed-*
	@touch $@

clean:
	rm -rf .venv .venv-lowest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
