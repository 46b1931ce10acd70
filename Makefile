# Every target but gpu and release starts with setup, which does nothing when .venv is up to date.
#   make setup PYTHON=python3.12             another Python
#   make setup PIP_FLAGS="--index-url URL"   another build of torch (README, "Install")
#   make setup CONSTRAINTS=                  the newest versions instead of the pinned ones
PYTHON ?= python3
OTHER_PYTHONS := 3.12 3.13
PIP_FLAGS ?=
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := labs,notebooks,test,browser,bench,dev,docs

# Three files of tests for each core: some tests wait for processes or for a limit of time. Each of these
# programs loads all tests and its own torch (15 s). Browsers and notebooks run beside the others, one file for each
# core, and are shown when they are done. A worker that dies (a test over its time limit ends it) is not replaced: with
# --dist loadfile the run would never end.
CORES := $(shell getconf _NPROCESSORS_ONLN)
BY_FILE := --maxprocesses 8 --dist loadfile --max-worker-restart 0
SIDE_BY_SIDE := --numprocesses $(shell expr 3 \* $(CORES)) $(BY_FILE)
BESIDE := build/beside
# Files in the order of their names. By number of tests, the labs' files come last: few tests, and long ones.
BY_NAME := --no-loadscope-reorder
SLOWEST := --durations 10 --durations-min 1
# Cells are compared with what they printed when the notebook was built, and each picture is looked at. pyproject.toml
# keeps nbval out of other runs: it takes two seconds to load in each process. SHORT cuts what is timed or checked anyway.
SHORT := -p tests.lessons.short_kernels
CELLS := -p tests.lessons.pictures_in_kernels -p nbval.plugin --nbval-lax --nbval-cell-timeout 240 --timeout 300
# A lesson's notebook has stubs for functions; after a check it goes on with the reference. Its outputs are committed,
# those of solution.ipynb are not: tests/lessons/test_bodies.py checks each stub and each solution.
NOTEBOOKS := $(sort $(wildcard lessons/*/lesson.ipynb)) lessons/START.ipynb

# One thread of torch a process: three that each ask for all cores mostly spin while they wait for one another.
test quick: export OMP_NUM_THREADS = 1
# The tests start hundreds of processes; each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup gates sizes quick test test-files test-screens gloo browser lessons tour bench gpu promises proofs soak mutations versions zoo test-zoo test-exports docs release format clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing packages into $(VENV): the first time this takes two to ten minutes, most of it torch's download."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[$(EXTRAS)]"
	@touch $@

gates: setup
	$(BIN)/python tools/gates.py

# The lines of each wing and room beside what they may have.
sizes: setup
	@$(BIN)/python tools/sizes.py

# Gates, and for a minute the tests nearest to what has changed since BASE (default: since this branch left main).
quick: setup
	$(BIN)/python tools/quick.py $(BASE)

test: setup
	@$(MAKE) --no-print-directory --keep-going --jobs 3 gates test-files test-screens

test-files: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(BY_NAME) $(SLOWEST) -m "not soak" \
		--ignore tests/architecture --ignore tests/browser

test-screens: setup
	@mkdir -p $(dir $(BESIDE))
	@echo "Browsers and notebooks run beside the tests; what they say stands in $(BESIDE)_*, and here at their end."
	@$(BIN)/python -m pytest tests/browser $(SHORT) $(SLOWEST) -m "not soak" >$(BESIDE)_browser.txt 2>&1 & browser=$$!; \
	$(BIN)/python -m pytest --numprocesses $(CORES) $(BY_FILE) $(SLOWEST) $(CELLS) $(SHORT) $(NOTEBOOKS) \
		>$(BESIDE)_cells.txt 2>&1; cells=$$?; wait $$browser; browser=$$?; cat $(BESIDE)_*.txt; exit $$((browser + cells))

# The tests of what is built on groups, over gloo's sockets: also those of scripts in other processes.
GROUPS := collectives comm data_parallel sharding tensor_parallel context_parallel expert_parallel pipeline hybrid checkpoint
gloo: export DISTLAB_BACKEND = gloo
gloo: export OMP_NUM_THREADS = 1
gloo: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(BY_NAME) $(SLOWEST) -m "not soak" --backend gloo \
		$(addprefix tests/,$(or $(ONLY),$(GROUPS)))

browser: setup
	bash tools/install_browser.sh

lessons: setup
	$(BIN)/distlab lesson start

# Every promise with its counts, an hour at most; after an interrupt the same command goes on. PROMISES.md has the table.
promises: setup
	$(BIN)/python tools/promises.py $(if $(ONLY),--only $(ONLY))

# The promises, and the rest also where one of them does not hold.
soak: setup
	$(MAKE) --keep-going promises proofs

# All other long tests, and every cell of each notebook as it is.
proofs: setup
	$(BIN)/python -m pytest -m soak --timeout 3600 -o faulthandler_timeout=3700 $$($(BIN)/python tools/promises.py --others)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(SLOWEST) $(CELLS) $(NOTEBOOKS) lessons/GUIDES.ipynb

# Models of every kind by every technique: SUPPORTED.md.
zoo: setup
	PYTHONPATH=tests/zoo $(BIN)/python -W ignore -m zoo_supported

# The same with real models of transformers, in an environment of its own; nothing is downloaded but packages.
test-zoo:
	$(MAKE) setup VENV=.venv-zoo EXTRAS=test,zoo
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m pytest tests/zoo/test_real.py

# Each tool's own parser reads what distlab export writes for it, in an environment of its own.
test-exports:
	$(MAKE) setup VENV=.venv-exports EXTRAS=test,exports CONSTRAINTS=
	OMP_NUM_THREADS=1 .venv-exports/bin/python -m pytest tests/simulator/export

# Changes of one place of the library that the nearest tests noticed once: they are to notice them still.
mutations: setup
	$(BIN)/python tests/mutation/library.py --workers $(CORES)

# Environments of other versions, in which `make promises ONLY=R14` compares techniques with one process: the oldest and
# the newest torch, and the pinned one with other Pythons. Those have all packages: `make test VENV=.venv-python-3.13`.
# A Python is looked for by its name and among pyenv's; `make versions PYTHON_3.13=PATH` says where one is.
versions: $(addprefix python-,$(OTHER_PYTHONS))
	$(MAKE) setup VENV=.venv-torch-2.11 EXTRAS=labs CONSTRAINTS= PIP_FLAGS='$(PIP_FLAGS) "torch==2.11.*"'
	$(MAKE) setup VENV=.venv-torch-newest EXTRAS=labs CONSTRAINTS=

python-%:
	@for python in $(or $(PYTHON_$*),python$* "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python); do \
		if "$$python" -m venv --help >/dev/null 2>&1; then \
			exec $(MAKE) --no-print-directory setup VENV=.venv-python-$* PYTHON="$$python"; fi; done; \
	echo "Python $*: not found as python$* nor among pyenv's, so left out; make versions PYTHON_$*=PATH names it."

# The website, in build/site: pages are read from where they stand, notebooks are not run, and a warning is an error.
docs: setup
	$(BIN)/python -m sphinx -q -W --keep-going -j $(CORES) -c docs/site -d build/doctrees . build/site
	@echo "The website is in build/site: open build/site/index.html in a browser."

# The wheel and the sdist, in dist/: checked, with the tour run from the wheel in a clean environment. The end says what is
# left to a person. `make release TAG=v0.1.0` also compares a tag with the version, as the release workflow does.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REPOSITORY = $(shell sed -n 's/^repository = "\(.*\)"/\1/p' pyproject.toml)
WEBSITE = $(shell sed -n 's/^website = "\(.*\)"/\1/p' pyproject.toml)
RELEASE := build/release
release:
	@test "$(or $(TAG),v$(VERSION))" = "v$(VERSION)" || { echo "TAG is $(TAG), and pyproject.toml has version $(VERSION):" \
		"take the tag v$(VERSION), or change the version" >&2; exit 2; }
	@rm -rf dist $(RELEASE); mkdir -p $(RELEASE)
	@awk '/^## /{split($$2, of, ":"); on = of[1] == "$(VERSION)"; next} on' CHANGELOG.md >$(RELEASE)/notes.md
	@test -s $(RELEASE)/notes.md || { echo "CHANGELOG.md has no entry '## $(VERSION)':" \
		"write there what is new for users" >&2; exit 2; }
	$(MAKE) setup VENV=.venv-release EXTRAS=release CONSTRAINTS=
	.venv-release/bin/python -m build
	.venv-release/bin/python -m twine check --strict dist/*
	.venv-release/bin/python -m venv $(RELEASE)/clean
	$(RELEASE)/clean/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint constraints.txt "$$(ls dist/*.whl)[labs]"
	cd $(RELEASE) && clean/bin/distlab tour
	@echo; echo "Ready in dist/, with the notes of the version in $(RELEASE)/notes.md. Left to a person:"
	@test -n "$(REPOSITORY)" || echo "- pyproject.toml, [tool.distlab], has no repository. Without it a package's page shows none of the" \
		"$$(grep -c '^!\[' README.md) pictures of README.md, and its links within the repository lead nowhere."
	@test -n "$(WEBSITE)" || echo "- pyproject.toml, [tool.distlab], has no website: a package's page has no link to the documentation."
	@! grep -q '^## $(VERSION) (not released yet)' CHANGELOG.md || echo "- CHANGELOG.md says 'not released yet': write the day."
	@echo "- Once: turn on Pages (source: GitHub Actions), make the environment 'release' in the repository's settings, and"
	@echo "  name the repository, release.yml and that environment as a trusted publisher at the package index."
	@echo "- Commit, wait until the tests have passed, then: git tag v$(VERSION) && git push origin v$(VERSION)"

tour: setup
	$(BIN)/distlab tour

bench: setup
	$(BIN)/distlab bench --save benchmarks/results.json
	$(BIN)/python tools/bench_table.py

# Installs nothing: it takes .venv where there is one, else PYTHON, which needs torch, numpy, cloudpickle and matplotlib.
#   make gpu GPU_FLAGS="--minutes 30 --out report"
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m distlab gpu $(GPU_FLAGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
