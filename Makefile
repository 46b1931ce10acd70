# Every target starts with setup, which does nothing when .venv is up to date.
#   make setup PYTHON=python3.12             another Python
#   make setup PIP_FLAGS="--index-url URL"   another build of torch (README, "Install")
#   make setup CONSTRAINTS=                  the newest versions instead of the pinned ones
PYTHON ?= python3
PIP_FLAGS ?=
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := labs,notebooks,test,browser,bench,dev

# Three files of tests at a time: most tests wait for processes. The browser's run alone, since they print times.
# A worker that dies (a test over its time limit ends it) is not replaced: with --dist loadfile the run would never end.
SIDE_BY_SIDE := --numprocesses 3 --dist loadfile --max-worker-restart 0
# Files in the order of their names. By number of tests, the labs' files come last: few tests, and minutes each.
BY_NAME := --no-loadscope-reorder

# One thread of torch a process: three that each ask for all cores mostly spin while they wait for one another.
test: export OMP_NUM_THREADS = 1
# The tests start hundreds of processes; each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup gates test browser lessons tour bench soak format clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[$(EXTRAS)]"
	@touch $@

gates: setup
	$(BIN)/python tools/gates.py

test: gates
	$(BIN)/python -m pytest tests/browser
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(BY_NAME) -m "not soak" --ignore tests/architecture --ignore tests/browser
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --nbval-lax --nbval-cell-timeout 60 --timeout 300 lessons

browser: setup
	bash tools/install_browser.sh

lessons: setup
	$(BIN)/distlab lesson start

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600

tour: setup
	$(BIN)/distlab tour

bench: setup
	$(BIN)/distlab bench --save benchmarks/results.json
	$(BIN)/python tools/bench_table.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
