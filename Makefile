# `make repro` builds, judges and registers an engine; `make test` checks everything. Both install what they need.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
TYPES := $(VENV)/types.txt
# Of pytest. On two cores the third runs while others wait for servers.
WORKERS ?= 3

# Stages, tests and tools run with this environment's programs, whether or not it is activated.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Let the environment's own packages win over whatever the user's shell points Python at.
unexport PYTHONPATH PYTHONHOME
# Without bytecode each process compiles all modules again: 31 instead of 11 s only to collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help repro test check style types types-in-file pytest install fetch-onnxruntime-gpu bench-peers bench-serving simulate-gate clean

help:
	@echo "make repro   install, then build, judge and register the engine of params.yaml"
	@echo "make test    install, then linters, types, import contracts, all CPU tests and the examples in docstrings"
	@echo "make check   linters, types and import contracts only"
	@echo "make bench-peers  our bundles against other engines on this machine; OURS='near-lossless=FOLDER 4-bit=FOLDER',"
	@echo "                  or random weights of a known shape; SHAPE=llama-3.2-1b"
	@echo "make bench-serving  our server against others on this machine; BUNDLE=FOLDER, takes about 20 minutes"
	@echo "make simulate-gate  how often the gate is wrong, for docs/benchmarks/gate.md; takes about ten minutes"
	@echo "make clean   remove artifacts and caches; .venv, downloads, the registry and the bundles it points to stay"

repro: $(INSTALLED)
	dvc repro
	tapeout summary

# Types are checked beside the tests, of which some only wait, and what was found in them is printed at the end.
test: style
	@$(MAKE) --no-print-directory --jobs=2 --keep-going types-in-file pytest; failed=$$?; cat $(TYPES); exit $$failed

pytest: $(INSTALLED)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: style types

style: $(INSTALLED)
	ruff format --check .
	ruff check .
	lint-imports
	clang-format --dry-run --Werror engines/kernels/*/source/* benchmarks/peers/*.c tests/sanitizers/*.[ch]

types: $(INSTALLED)
	pyright

types-in-file: $(INSTALLED)
	pyright >$(TYPES) 2>&1

install: $(INSTALLED)

# For the dry run of ort-cuda: 256 MB, into the cache, not into the environment.
fetch-onnxruntime-gpu: $(INSTALLED)
	python -m tests.ort_cuda.fetch

OURS ?= near-lossless=artifacts/candidate
bench-peers: $(INSTALLED)
	python -m benchmarks.peers.run $(if $(SHAPE),--shape $(SHAPE),$(addprefix --ours ,$(OURS))) $(FLAGS)

BUNDLE ?= artifacts/candidate
bench-serving: $(INSTALLED)
	python -m benchmarks.serving.run --bundle $(BUNDLE) $(FLAGS)

simulate-gate: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m benchmarks.gate.simulate $(FLAGS)

# Done again only when the lock or the project's metadata changes; an interrupted run leaves no stamp.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "found $$($(PYTHON) --version); Tapeout needs 3.11 or later: make PYTHON=python3.12 ..."; exit 2; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf artifacts .dvc/cache .dvc/tmp .pytest_cache .hypothesis .ruff_cache .import_linter_cache
