# Everything runs in .venv. A stamp there says what is installed, so that only a changed
# pyproject.toml installs again; pip leaves what is satisfied, torch first of all, as it is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n 2
QKVPASS_FUZZ_EXAMPLES ?= 5000

.PHONY: demo test lint fuzz examples zoo clean

demo: $(VENV)/.installed-cli-encoders
	$(BIN)/qkvpass demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fuzz: $(VENV)/.installed-test
	QKVPASS_FUZZ_EXAMPLES=$(QKVPASS_FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/test_fuzz.py --timeout 0

examples: $(VENV)/.installed-cli-encoders
	set -e; for example in examples/*.py; do echo "== $$example"; $(BIN)/python $$example; done

zoo: $(VENV)/.installed-zoo
	OMP_NUM_THREADS=1 $(BIN)/python tests/run_zoo.py $(ZOO_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

$(VENV)/.installed-cli-encoders: EXTRAS := cli,encoders
$(VENV)/.installed-test: EXTRAS := test
$(VENV)/.installed-zoo: EXTRAS := zoo
# mypy reads the types of typer and rich.
$(VENV)/.installed-dev: EXTRAS := dev,cli
