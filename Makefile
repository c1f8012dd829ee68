# What people and CI run. `make serve ARGS="--port 9000"` passes flags on.
.PHONY: setup serve test test-slow lint format bench clean
ARGS ?=
PY := .venv/bin/python

setup: .venv/.octavo-serve  ## .venv/ with the `octavo` command

serve: .venv/.octavo-serve  ## fetch the default model if needed and serve on 127.0.0.1:8000
	.venv/bin/octavo serve $(ARGS)

test: .venv/.octavo-test  ## every test that needs neither a GPU nor long minutes
	$(PY) -m pytest $(ARGS)

test-slow: .venv/.octavo-test  ## the tests marked slow
	$(PY) -m pytest -m slow $(ARGS)

lint: .venv/.octavo-test  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy server engine kernels monitoring loadtest tests

format: .venv/.octavo-test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.octavo-test  ## the kernels against this machine's ceilings
	$(PY) -m kernels.bench $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache

.venv/.octavo-serve: pyproject.toml scripts/setup
	scripts/setup serve
.venv/.octavo-test: pyproject.toml scripts/setup
	scripts/setup test
