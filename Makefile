# `make demo` and `make test` need Python, make and a C++ compiler, and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The caches of compilers and numba are in the tree: warm on the second run, removed by `make clean`.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
export NUMBA_CACHE_DIR ?= $(CURDIR)/.cache/numba
# On some x86 machines oneDNN's bfloat16 matmul dies with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX2

.PHONY: demo test test-fast test-long test-spawn test-chaos test-torch lint bench bench-verdicts bench-locate sweep-ops setup lock clean

setup: $(STAMP)

# Torch is installed first and alone, because another package's open version range would take the newest CUDA build.
# Bytecode is compiled here, because an editable install has none and the tests start many Pythons.
$(STAMP): pyproject.toml requirements-dev.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q src
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

# Another torch has a virtual environment of its own; 2.15.0 takes 3 GB with its CUDA libraries, which need no GPU.
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

$(OTHER)/.installed: pyproject.toml requirements-dev.lock
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	grep -v '^torch==' requirements-dev.lock > $(OTHER)/others.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -r $(OTHER)/others.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# Tests that take minutes each: a compiler compared node by node, a diagnosis that compiles fifty times.
test-long: setup
	$(BIN)/python -m pytest -m long

# Systems without fork start workers in another way. Here every test process has os.fork removed, so Linux takes it too.
test-spawn: setup
	TORCHDELTA_TEST_SPAWN=1 $(BIN)/python -m pytest -n 2 --dist loadgroup tests/test_isolate.py tests/test_cli.py \
		tests/test_minify.py tests/test_reduction_cli.py

# Ten minutes of commands that are killed, interrupted and short of disk; the seed of a failure is in its message.
SEED ?= 0
test-chaos: setup
	$(BIN)/python tests/chaos.py --seconds 600 --seed $(SEED)

bench: setup
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/guard.py
	$(BIN)/python benchmarks/verdicts.py --subset --out build/verdicts-subset
	$(BIN)/python benchmarks/locate.py --subset --out build/locate-subset

# Takes hours and resumes after an interruption. The table is in build/verdicts/table.md.
bench-verdicts: setup
	$(BIN)/python benchmarks/verdicts.py --out build/verdicts

# Takes hours and resumes after an interruption. The tables are in build/locate/table.md.
bench-locate: setup
	$(BIN)/python benchmarks/locate.py --out build/locate

# Takes most of an hour and resumes after an interruption. Exits with 1 if any operator diverges, 4 if any crashes.
sweep-ops: setup
	mkdir -p build/sweep-ops
	$(BIN)/torchdelta op --opinfo all --probes aot/static/min-cut,aot/dynamic/min-cut,backend --backends aot_eager \
		-o build/sweep-ops --resume --json build/sweep-ops/sweep.json

# Writes the lock file from the packages that are installed in .venv.
lock:
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements-dev.lock

clean:
	rm -rf $(VENV) .venv-torch-* .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
