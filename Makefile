# make train   the benchmark        make test   the tests        make check   the safety check
# The first of them makes .venv; PYTHON=python3.12 chooses another Python (3.11 or later).

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check benchmark clean

train: .venv/installed
	$(BIN)/python train_minimal.py --partitions 4 --micro-batches 16

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/python setup.py

benchmark: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[benchmarks]'
	$(BIN)/python benchmarks/compare.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache

.venv/installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, " \
	  "this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@
