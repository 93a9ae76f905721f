PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test venv lint types fast docs bench clean

run: $(VENV)/.installed
	$(BIN)/shardwise demo

test: venv
	bash scripts/check

venv: $(VENV)/.installed-dev

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

fast: venv
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 2 --dist worksteal -m "not slow and not processes and not gpu"

docs: venv
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf build dist report.html .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp newer than pyproject.toml means that the environment matches it.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(VENV)/.installed $@
