# Each target makes the environment when it is missing or when what it depends on changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests start hundreds of processes: without bytecode each of them compiles the packages anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env demo test test-installed test-oldest mutations stress bench gpu docs lint clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# It excludes the fsspec that s3fs needs, by its pin of a library for data sets.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchtitan spmd_types
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m ckpt_trainers.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not stress'

# A wheel in an environment of its own, which has nothing that the engine does not ask for.
test-installed: $(STAMP)
	rm -rf build/wheel build/installed
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	$(PYTHON) -m venv build/installed
	build/installed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	build/installed/bin/python tests/installed.py alone
	# From elsewhere, so that the types are the wheel's and not those of the checkout.
	cd build && ../$(BIN)/mypy --config-file= --strict --python-executable installed/bin/python ../tests/installed.py
	build/installed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls build/wheel/*.whl)[cli,trainers]"
	build/installed/bin/python tests/installed.py whole

# With the oldest versions of what the engine needs. OLDEST=--torch has the oldest torch, too, which has gigabytes;
# without it only what talks to the small libraries is asked.
# What the oldest ones cannot do themselves: s3fs wants the fsspec of its day; safetensors' own reader has not all dtypes; fsspec's
# filecache does not write.
test-oldest: NEW = not s3 and not stock_reader and not filecache
test-oldest: $(STAMP)
	rm -rf build/oldest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target build/oldest \
		$(if $(OLDEST),,--no-deps) $$($(BIN)/python tests/oldest.py $(OLDEST))
	PYTHONPATH=build/oldest $(BIN)/python -m pytest -n 2 -m 'not stress' -k '$(NEW)' $$($(BIN)/python tests/oldest.py --tests)

# Faults put into the engine on purpose: each is found by a test that is named.
mutations: $(STAMP)
	$(BIN)/python tests/mutations.py

stress: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m stress -rP
	CKPTCORE_TEST_EXAMPLES=3 $(BIN)/python -m pytest -n 2 -m hypothesis

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks all

# Whatever needs an accelerator, on all cards that are here; says so where there is none.
gpu: $(STAMP)
	$(BIN)/python -m benchmarks gpu

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
