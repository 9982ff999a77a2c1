# PrivTune: `make demo` runs the main job on real data, `make test` runs the suite, `make test-quick` a part of it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-quick test-minimum test-newest mutants campaigns docs lint format install release-check clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m compileall -q privtune  # as pip does for what is not editable: half of a short command
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m privtune demo

# Files stay whole, so that what a file's tests share is made once. One worker a physical core.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile

# Some tests of every room in one process; two minutes of CPU at most.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -m "quick and not slow" tests

# The quick tests on the least versions that pyproject.toml admits, in an environment of their own. UV_OPTIONS says
# where packages are, where that is not the public index. Old versions warn of new ones: warnings are no errors here.
test-minimum:
	$(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet uv
	build/uv/bin/uv venv --quiet --clear --python $(PYTHON) build/minimum
	build/uv/bin/uv pip install --quiet --python build/minimum --resolution lowest-direct $(UV_OPTIONS) \
		--editable ".[demo,postgres]" "dadaptation>=3.2" "hypothesis>=6.120" "prodigyopt>=1.1" "pytest>=8.3" \
		"pytest-timeout>=2.3" "pytest-xdist>=3.6"
	build/minimum/bin/python -m pytest -m "quick and not slow" -W default -p no:cacheprovider tests

# What talks to MLflow, on its newest version, beside the pinned one. One test is left out: it says which versions the
# saved view was looked at with; another shows the plain list and a sentence.
test-newest: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target build/newest mlflow
	PYTHONPATH=build/newest $(BIN)/python -m pytest -k "not browser_tests_look_at" tests/tracking

# Wheel and sdist: built, checked, looked into, installed without extras, tried; and what is in them, as CycloneDX.
RELEASE := build/release
release-check:
	rm -rf $(RELEASE) && $(PYTHON) -m venv $(RELEASE)/tools && $(PYTHON) -m venv $(RELEASE)/bare
	$(RELEASE)/tools/bin/python -m pip install --quiet build twine cyclonedx-bom
	$(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/dist .
	$(RELEASE)/tools/bin/twine check --strict $(RELEASE)/dist/*
	$(RELEASE)/tools/bin/python tests/release.py $(RELEASE)/dist
	$(RELEASE)/bare/bin/python -m pip install --quiet --constraint constraints.txt $(RELEASE)/dist/*.whl
	cd $(RELEASE) && bare/bin/privtune study create $(CURDIR)/docs/examples/tiny.yaml && bare/bin/privtune study run tiny \
		&& bare/bin/privtune budget export tiny && bare/bin/privtune budget verify --certificate tiny.certificate.json
	$(RELEASE)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
		--output-format JSON --output-file $(RELEASE)/privtune.cdx.json $(RELEASE)/bare/bin/python

# Plants mistakes in what the guarantee rests on; the tests must find every one.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Races of 64 processes, hundreds of kills, thousands of damages and odd inputs, at full length: hours of CPU.
# On PostgreSQL too where PRIVTUNE_TEST_POSTGRES_URL says where; what was counted stands in campaigns.log.
campaigns: $(STAMP)
	PRIVTUNE_CAMPAIGN=full $(BIN)/python -m pytest --timeout 0 --log-file campaigns.log --log-file-level INFO \
		tests/ledger/test_campaigns.py tests/ledger/test_model.py tests/study/test_lifecycle.py tests/cli/test_fuzz.py \
		tests/accounting tests/training/mechanism/test_tails.py tests/audit tests/study/test_struck.py \
		tests/tracking/test_servers.py tests/tracking/test_times.py tests/execution/test_processes.py \
		tests/ledger/test_damages.py tests/cli/test_struck_commands.py tests/cli/test_planted.py \
		tests/cli/test_environment.py tests/cli/test_working_folder.py

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
