# make demo: plan, emit and train a small GPT on four CPU ranks.   make test: lint, then every test.
# make unit: the unit tests alone.   make docs: the generated pages and the notebooks with what they show.
# Both create .venv when it is missing, and bring it up to date when what it is made from changes.

PYTHON := .venv/bin/python
WORKERS := 2
INSTALLED := .venv/.installed

.PHONY: demo test unit lint style types tests format docs clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(PYTHON) examples/demo.py

# Types take one core for a minute where nothing is cached: they are checked beside the first tests.
test: style
	$(MAKE) --jobs 2 types tests

tests: $(INSTALLED)
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup

unit: $(INSTALLED)
	$(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -m "not ranks and not sweep"

lint: style types

style: $(INSTALLED)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

types: $(INSTALLED)
	$(PYTHON) -m mypy
	.venv/bin/lint-imports

format: $(INSTALLED)
	$(PYTHON) -m ruff format
	$(PYTHON) -m ruff check --fix

# torch goes first and alone: the pinned build is taken before another package's range can ask for a newer one.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	test -x $(PYTHON) || python3.11 -m venv .venv || python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --constraint constraints.txt torch
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

docs: $(INSTALLED)
	$(PYTHON) -m docs.generate
	$(PYTHON) notebooks/execute.py

clean:
	rm -rf .venv build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
