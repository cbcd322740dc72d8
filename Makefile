# make demo and make test each set everything up on a fresh machine first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .vllm-venv

.PHONY: help setup demo test test-full test-rest durations test-loggers test-vllm vllm-env invariants check lint types pages screenshots docs smoke measure lock bench faults clean

help:
	@echo "make demo    set up, then watch a small model learn arithmetic (under 5 minutes on 2 cores)"
	@echo "make test    set up, then run the tests that hold every promise once (8 minutes on 2 cores)"
	@echo "make test-full  all tests: every family, kernel, Ray layout, browser (an hour on 2 cores)"
	@echo "make test-loggers  real clients and servers of trackers: W&B, MLflow, Trackio, SwanLab (installs about 600 MB)"
	@echo "make check   lint, types, make test, and the invariants with the kernels of lesser CPUs: what CI begins with"
	@echo "make pages   write the generated parts of docs/ anew: models, datasets, config reference, rules of the doctor"
	@echo "make screenshots  take the pictures of docs/watch.md anew; needs a Chromium"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make smoke   build the wheel, install it into an empty environment, train one step with it"
	@echo "make lock    write the versions and hashes of the image's packages (requirements/image.txt)"
	@echo "make measure counts of the source: lines, small files, Any, class names defined twice, cycles"
	@echo "make faults  kills, damage, full disks, hostile inputs: the long campaign (an hour and a half; docs/reliability.md)"
	@echo "make durations  measure all tests anew; their tier follows from tests/durations.json"
	@echo "make test-vllm  make an environment with vLLM for CPUs (6 GB, .vllm-venv) and run the tests that need it"
	@echo "make bench   the same GRPO and DPO job with TRL and with posttrain, side by side"

setup: $(STAMP)

# torch first, and pinned: otherwise another package may pull a build with several GB of CUDA libraries.
$(STAMP): pyproject.toml requirements/torch.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements/torch.txt -e '.[dev]'
	touch $(STAMP)

# The packages of the image, with their hashes. Versions stay as they are; with UPGRADE=--upgrade they become the newest that fit.
lock:
	$(BIN)/uv pip compile pyproject.toml requirements/image.in --extra ray --extra s3 --universal --python-version 3.11 \
	  --override requirements/image-overrides.txt --no-emit-package torch --no-emit-package networkx \
	  --no-emit-package setuptools --generate-hashes --no-annotate --custom-compile-command "make lock" \
	  --quiet --output-file requirements/image.txt $(UPGRADE)

demo: setup
	$(BIN)/posttrain demo

# Two workers with one thread each are faster on small models than one with two. In the order of the folders slow files are first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder

WITH_VLLM = $(if $(wildcard $(VLLM_VENV)/.installed),POSTTRAIN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python)

# Every promise at least once, chosen by measured times (tests/tiers.py): at most 8 minutes on two quiet cores.
test: setup
	$(PYTEST) --tier fast

# Everything: all families, Ray nodes, interpreted kernels, lost machines, browsers; vLLM if `make vllm-env` has made its environment.
test-full: setup
	$(WITH_VLLM) $(PYTEST)

# What `make test` leaves out, until UNTIL (seconds since 1970): tests of recently changed files first, the others from a place
# that moves every day.
UNTIL ?= 9999999999
test-rest: setup
	$(WITH_VLLM) $(PYTEST) --tier rest --rotate --until $(UNTIL) $$($(BIN)/python tools/touched_tests.py)

# Measure every test anew, on a quiet machine: the tier of a test follows from its time.
durations: setup
	$(PYTEST) --record-durations

# Real trackers. Their clients are large and not needed otherwise, so they have an environment of their own.
LOGGERS := $(VENV)/loggers
test-loggers: setup
	test -x $(LOGGERS)/bin/python || $(BIN)/python -m venv $(LOGGERS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$(echo $(LOGGERS)/lib/python*/site-packages)/posttrain.pth
	$(LOGGERS)/bin/pip install --quiet --disable-pip-version-check wandb trackio swanlab mlflow
	OMP_NUM_THREADS=1 $(LOGGERS)/bin/python -m pytest tests/integration/test_trackers.py tests/unit/reporting/test_sinks.py

# Invariants must hold with the kernels of every CPU. `make test` uses the best ones that this CPU has; here are the others.
# Without Ray: such tests compare runs that use the same kernels.
invariants: setup
	set -e; for capability in $$($(BIN)/python tests/cpu_capabilities.py); do \
	  echo "tests/invariants with ATEN_CPU_CAPABILITY=$$capability"; \
	  ATEN_CPU_CAPABILITY=$$capability OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --tier fast -m "not ray" tests/invariants; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: setup
	$(BIN)/mypy

check: lint types test invariants

# Strict: a broken link, or a page that docs/README.md does not list, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Needs a package index: installs torch anew.
smoke: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/smoke_install.sh $(CURDIR)/$(BIN)/python

# The parts of docs/ that are generated; a test fails while one is not current.
pages: setup
	$(BIN)/python tests/generated_pages.py

# The pictures of docs/watch.md, made by the tests; they need a Chromium.
screenshots: setup
	POSTTRAIN_WRITE_SCREENSHOTS=1 $(BIN)/pytest tests/integration/test_watch_in_browser.py

measure: setup
	$(BIN)/python tools/measure.py

bench: setup
	$(BIN)/python bench/cpu_vs_trl.py

# vLLM has an environment of its own: its pins do not affect ours. For a GPU: python tools/vllm_env.py .vllm-venv
vllm-env: setup
	test -f $(VLLM_VENV)/.installed || $(BIN)/python tools/vllm_env.py $(VLLM_VENV) --cpu
	touch $(VLLM_VENV)/.installed

test-vllm: vllm-env
	POSTTRAIN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/pytest tests/integration/test_vllm_run.py

# Parts: ONLY=kills,damage. One case again: ONLY=kills CASE=one-process-3 SEED=0. Tables: OUT=folder.
SEED ?= 0
OUT ?= results/faults
MINUTES ?= 150
faults: setup
	PYTHONPATH=tests $(BIN)/python -m faults --only "$(ONLY)" $(if $(CASE),--case "$(CASE)") --seed $(SEED) --out $(OUT) --minutes $(MINUTES)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
