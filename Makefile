# PrivTune: `make demo` runs the main job on real data, `make test` runs the suite, `make test-quick` a part of it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-quick mutants campaigns docs lint format install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m privtune.cli demo

# Files stay whole, so that what a file's tests share is made once. One worker a physical core.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

# Some tests of every room in one process; three minutes of CPU at most.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -m "quick and not slow" tests

# Plants mistakes in what the guarantee rests on; the tests must find every one.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Races of 64 processes, hundreds of kills, a thousand odd inputs, at full length: some 40 minutes of CPU.
# On PostgreSQL too where PRIVTUNE_TEST_POSTGRES_URL says where; what was counted stands in campaigns.log.
campaigns: $(STAMP)
	PRIVTUNE_CAMPAIGN=full $(BIN)/python -m pytest --timeout 0 --log-file campaigns.log --log-file-level INFO \
		tests/ledger/test_campaigns.py tests/study/test_lifecycle.py tests/cli/test_fuzz.py tests/accounting/test_fuzz.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, from docs/, the READMEs beside the code, and the code; nothing is fetched.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build demo-output .mypy_cache .ruff_cache
