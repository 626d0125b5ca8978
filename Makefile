# Everything runs in .venv. A stamp there says what is installed, so that only a changed
# pyproject.toml installs again; pip leaves what is satisfied, torch first of all, as it is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= -n 2
QKVPASS_FUZZ_EXAMPLES ?= 5000

.PHONY: demo test test-matrix lint fuzz examples zoo docs benchmarks clean

demo: $(VENV)/.installed-cli-encoders
	$(BIN)/qkvpass demo

test: $(VENV)/.installed-test $(VENV)/.installed-flash
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# MATRIX_ARGS="--python 3.10 --torch 2.13.0 -- tests/test_layout.py" for less than all.
test-matrix:
	$(PYTHON) tests/matrix.py $(MATRIX_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fuzz: $(VENV)/.installed-test
	QKVPASS_FUZZ_EXAMPLES=$(QKVPASS_FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/test_fuzz.py --timeout 0

examples: $(VENV)/.installed-cli-encoders
	set -e; for example in examples/*.py; do echo "== $$example"; $(BIN)/python $$example; done

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky -q -b html docs site

# The page and plots of what docs/measured holds.
benchmarks: $(VENV)/.installed-bench
	$(BIN)/python tests/bench_page.py

zoo: $(VENV)/.installed-zoo
	OMP_NUM_THREADS=1 $(BIN)/python tests/run_zoo.py $(ZOO_ARGS)

clean:
	rm -rf $(VENV) .venv-matrix build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# flash-attn for its ops, schemas and fakes alone: without its GPU build it takes seconds.
$(VENV)/.installed-flash: pyproject.toml $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet setuptools wheel psutil packaging ninja einops
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE \
		$(BIN)/python -m pip install --quiet --no-build-isolation flash-attn==2.8.3
	touch $@

$(VENV)/.installed-cli-encoders: EXTRAS := cli,encoders
$(VENV)/.installed-test: EXTRAS := test
$(VENV)/.installed-docs: EXTRAS := docs
$(VENV)/.installed-bench: EXTRAS := bench
$(VENV)/.installed-zoo: EXTRAS := zoo
# mypy reads the types of typer and rich.
$(VENV)/.installed-dev: EXTRAS := dev,cli
