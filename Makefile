# Each target makes the environment when it is missing or when what it depends on changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: env demo test stress bench docs lint clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m ckpt_trainers.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m 'not stress'

stress: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m stress -rP

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks all

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo build/site/index.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build demo-runs *.egg-info
