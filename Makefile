# make demo and make test each set everything up on a fresh machine first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
VLLM_VENV ?= .vllm-venv
LM_EVAL_VENV ?= .lm-eval-venv
INSPECT_VENV ?= .inspect-venv
AGENTS_VENV ?= .agents-venv

.PHONY: help setup demo test test-full test-rest durations test-loggers test-vllm vllm-env test-environments foreign-envs invariants check lint types pages screenshots docs smoke measure lock bench reproduce-gsm8k reproduce-qwen3-4b faults clean

help:
	@echo "make demo    set up, then watch a small model learn arithmetic (3 to 6 minutes on 2 cores, and 1 for the installation)"
	@echo "make test    set up, then run at least one test of every guarantee (8 minutes on 2 cores)"
	@echo "make test-full  all tests: every family, kernel, Ray layout, browser (an hour on 2 cores)"
	@echo "make test-loggers  real clients and servers of trackers: W&B, MLflow, Trackio, SwanLab (installs about 600 MB)"
	@echo "make check   lint, types, make test, and the invariants at lower ATen CPU capabilities: what CI begins with"
	@echo "make pages   write the generated parts of docs/ anew: models, datasets, rules of the doctor, published guides"
	@echo "make screenshots  take the pictures of docs/watch.md anew; needs a Chromium"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make smoke   build the wheel, install it into an empty environment, train one step with it"
	@echo "make lock    write the versions of the packages that are installed (requirements/*.txt)"
	@echo "make measure counts of the source: lines, small files, Any, class names defined twice, cycles"
	@echo "make faults  kills, damage, full disks, hostile inputs: the long campaign (two to three hours, an hour and a half with JOBS=3; docs/reliability.md)"
	@echo "make durations  measure all tests anew; their tier follows from tests/durations.json"
	@echo "make test-environments  make environments with OpenEnv and verifiers and run the tests that need them"
	@echo "make test-vllm  make an environment with vLLM for CPUs (6 GB, .vllm-venv) and run the tests that need it"
	@echo "make bench   the same GRPO and DPO job with TRL and with posttrain, side by side"
	@echo "make reproduce-gsm8k, make reproduce-qwen3-4b  on a GPU: train and evaluate on GSM8K (docs/evidence.md has what to expect)"

setup: $(STAMP)

# The versions that were tested, with the torch of requirements/torch.txt. What `setup` installs includes what the demo needs.
$(STAMP): pyproject.toml requirements/torch.txt requirements/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py requirements/dev.txt
	touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml requirements/torch.txt requirements/demo.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py requirements/demo.txt
	touch $(DEMO_STAMP)

# The packages of demo, tests and image. Versions stay as they are; with UPGRADE=--upgrade they become the newest that fit.
COMPILE = $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --no-annotate --no-emit-package torch \
  --override requirements/image-overrides.txt --custom-compile-command "make lock" --quiet $(UPGRADE)
lock:
	$(COMPILE) --extra ui --extra gate --extra gguf --output-file requirements/demo.txt
	$(COMPILE) --extra dev --output-file requirements/dev.txt
	$(BIN)/uv pip compile pyproject.toml requirements/image.in --extra ray --extra s3 --universal --python-version 3.11 \
	  --override requirements/image-overrides.txt --no-emit-package torch --no-emit-package networkx \
	  --no-emit-package setuptools --generate-hashes --no-annotate --custom-compile-command "make lock" \
	  --quiet --output-file requirements/image.txt $(UPGRADE)

demo: $(DEMO_STAMP)
	$(BIN)/posttrain demo

# Two workers with one thread each are faster on small models than one with two. In the order of the folders slow files are first.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder

WITH_VLLM = $(if $(wildcard $(VLLM_VENV)/.installed),POSTTRAIN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python)
WITH_FOREIGN = $(if $(wildcard .openenv-venv/.installed),POSTTRAIN_OPENENV_PYTHON=$(abspath .openenv-venv)/bin/python) \
	$(if $(wildcard .verifiers-venv/.installed),POSTTRAIN_VERIFIERS_PYTHON=$(abspath .verifiers-venv)/bin/python)

# The tests with real packages run where their environments are (docs/evaluate.md).
WITH_OTHERS = $(foreach one,LM_EVAL INSPECT AGENTS,$(if $(wildcard $($(one)_VENV)/bin/python),POSTTRAIN_$(one)_PYTHON=$(abspath $($(one)_VENV))/bin/python))

# At least one test of every guarantee, chosen by measured times (tests/tiers.py): at most 8 minutes on two quiet cores.
test: setup
	$(PYTEST) --tier fast

# Everything: all families, Ray nodes, interpreted kernels, lost machines, browsers; vLLM, OpenEnv, verifiers and trackers if
# `make vllm-env`, `make foreign-envs` and `make test-loggers` have made their environments.
test-full: setup
	$(WITH_VLLM) $(WITH_FOREIGN) $(WITH_OTHERS) $(PYTEST)
	$(if $(wildcard $(LOGGERS)/bin/python),$(TEST_LOGGERS),@echo "real trackers are not tested: make test-loggers installs them")

# What `make test` leaves out, until UNTIL (seconds since 1970): tests of recently changed files first, the others from a place
# that moves every day.
UNTIL ?= 9999999999
test-rest: setup
	$(WITH_VLLM) $(WITH_FOREIGN) $(WITH_OTHERS) $(PYTEST) --tier rest --rotate --until $(UNTIL) $(if $(FIRST),--first $(FIRST)) $$($(BIN)/python tools/touched_tests.py)

# Measure every test anew, on a quiet machine: the tier of a test follows from its time.
durations: setup
	$(PYTEST) --record-durations

# Real trackers. Their clients are large and not needed otherwise, so they have an environment of their own.
LOGGERS := $(VENV)/loggers
TEST_LOGGERS = OMP_NUM_THREADS=1 $(LOGGERS)/bin/python -m pytest tests/integration/test_trackers.py tests/unit/reporting/test_sinks.py
test-loggers: setup
	test -x $(LOGGERS)/bin/python || $(BIN)/python -m venv $(LOGGERS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$(echo $(LOGGERS)/lib/python*/site-packages)/posttrain.pth
	$(LOGGERS)/bin/pip install --quiet --disable-pip-version-check wandb trackio swanlab mlflow
	$(TEST_LOGGERS)

# Invariants must hold with the kernels of every CPU. `make test` uses the best ones that this CPU has; here are the others.
# Without Ray: such tests compare runs that use the same kernels.
invariants: setup
	set -e; for capability in $$($(BIN)/python tests/cpu_capabilities.py); do \
	  echo "tests/invariants with ATEN_CPU_CAPABILITY=$$capability"; \
	  ATEN_CPU_CAPABILITY=$$capability OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadscope --tier fast -m "not ray" tests/invariants; \
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

# Results to compare, on a GPU. GSM8K is read from data/gsm8k where that is, and else from the hub.
GSM8K_HERE := $(wildcard data/gsm8k/train.jsonl.gz)
HUB_ROWS := data.train.data_path=null data.validation.data_path=null data.validation.split=test
reproduce-gsm8k: setup
	$(BIN)/posttrain models fetch smollm2
	$(BIN)/posttrain sft --config configs/sft_smollm2_gsm8k.yaml \
	  $(if $(GSM8K_HERE),,data.train.dataset_name=openai/gsm8k data.train.subset=main data.train.data_path=null)
	$(BIN)/posttrain grpo --config configs/grpo_smollm2_gsm8k.yaml policy.model_name=results/sft_smollm2_gsm8k/step_232 \
	  $(if $(GSM8K_HERE),,$(HUB_ROWS))
	$(BIN)/posttrain eval results/grpo_smollm2_gsm8k data.dataset_name=gsm8k $(if $(GSM8K_HERE),data.data_path=data/gsm8k/test.jsonl) \
	  generation.max_new_tokens=256 eval.save_path=results/reproduce_gsm8k

reproduce-qwen3-4b: setup
	$(BIN)/posttrain grpo --config configs/grpo_qwen3_4b_gsm8k.yaml
	$(BIN)/posttrain eval results/grpo_qwen3_4b_gsm8k data.dataset_name=gsm8k data.prompt_file=examples/prompts/cot.txt \
	  tokenizer.chat_template_kwargs.enable_thinking=false generation.max_new_tokens=1024 eval.save_path=results/reproduce_qwen3_4b

# vLLM has an environment of its own: its pins do not affect ours. For a GPU: python tools/vllm_env.py .vllm-venv
vllm-env: setup
	test -f $(VLLM_VENV)/.installed || $(BIN)/python tools/vllm_env.py $(VLLM_VENV) --cpu
	touch $(VLLM_VENV)/.installed

test-vllm: vllm-env
	POSTTRAIN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python OMP_NUM_THREADS=1 $(BIN)/pytest tests/integration/test_vllm_run.py

# OpenEnv and verifiers have environments of their own: they exclude each other, and some of our packages.
foreign-envs: setup
	for kind in openenv verifiers; do \
		test -f .$$kind-venv/.installed || $(BIN)/python tools/foreign_env.py $$kind .$$kind-venv || exit 1; done

test-environments: foreign-envs
	POSTTRAIN_OPENENV_PYTHON=$(abspath .openenv-venv)/bin/python \
	POSTTRAIN_VERIFIERS_PYTHON=$(abspath .verifiers-venv)/bin/python OMP_NUM_THREADS=1 \
	$(BIN)/pytest tests/unit/environments tests/integration/test_environment_runs.py

# Parts: ONLY=kills,damage. One case again: ONLY=kills CASE=one-process-3 SEED=0. Tables: OUT=folder.
SEED ?= 0
OUT ?= results/faults
MINUTES ?= 200
JOBS ?= 1
faults: setup
	PYTHONPATH=tests $(BIN)/python -m faults --only "$(ONLY)" $(if $(CASE),--case "$(CASE)") --seed $(SEED) --out $(OUT) --minutes $(MINUTES) --jobs $(JOBS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
