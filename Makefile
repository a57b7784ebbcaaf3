# make demo            the same prompt through plain mlx_lm.generate: stock, MLX_SINKS=1, dense
# make test            the whole suite on both ends of the supported mlx-lm range
# make test-upstream   mlx-lm's own tests on both ends, without mlx-sinks and with it
# make speed           the indexer's selection and attention, upstream's and ours side by side
# Each works as the only command after a clone; all they write is under build/.

PYTHON ?= python3
# What mlx runs on: macOS needs nothing; on Linux cpu, or cuda with BACKEND=cuda.
BACKEND ?= $(if $(filter Darwin,$(shell uname)),,cpu)
empty :=
comma := ,
EXTRAS_LIST = $(subst $(empty) $(empty),$(comma),$(strip $(EXTRAS) $(BACKEND)))

# The oldest supported mlx-lm runs with the oldest mlx that it accepts.
OLDEST := mlx-lm==0.31.3 mlx==0.31.2
# What pyproject.toml doesn't bound: mlx_sinks/targets.py refuses a release beyond.
NEWEST := --upgrade 'mlx-lm>=0.31.3,<0.33'

PIP_OPTIONS := --quiet --disable-pip-version-check
SUITE := -m pytest --numprocesses 2 --dist loadfile

.PHONY: demo speed test test-newest test-oldest lint clean
.PHONY: test-upstream test-upstream-newest test-upstream-oldest

demo: build/venv-demo/ready
	build/venv-demo/bin/python bench/demo.py --build build --out build/demo

speed: build/venv-speed/ready
	build/venv-speed/bin/python bench/indexer_speed.py $(SPEED) --out build/indexer_speed
	build/venv-speed/bin/python bench/attention_speed.py $(ATTENTION) --out build/attention_speed

test: lint test-newest test-oldest

test-newest: build/venv-newest/ready
	build/venv-newest/bin/python $(SUITE) --smollm2-seeds 0

# The oldest mlx misreads the real model's file: the newest converts it for both.
test-oldest: build/venv-oldest/ready build/venv-newest/ready
	build/venv-newest/bin/python bench/smollm2/build.py --kind llama --out build/smollm2
	build/venv-oldest/bin/python $(SUITE) --smollm2-seeds 1 --zoo random

UPSTREAM := tests/upstream_suite.py --build build/upstream

test-upstream: test-upstream-newest test-upstream-oldest

test-upstream-newest: build/venv-newest/ready
	build/venv-newest/bin/python $(UPSTREAM) --out build/upstream/newest

test-upstream-oldest: build/venv-oldest/ready
	build/venv-oldest/bin/python $(UPSTREAM) --out build/upstream/oldest

# More options of bench/indexer_speed.py. A GPU multiplies half precision.
SPEED ?= --dtype $(if $(filter cpu,$(BACKEND)),float32,bfloat16)
# The same of bench/attention_speed.py: steps of a next turn, and mlx-lm's own.
ATTENTION ?= $(SPEED) --heads 16 --queries 64 2048 --arms upstream gathered --rounds 2

lint: build/venv-newest/ready
	build/venv-newest/bin/ruff check .
	build/venv-newest/bin/ruff format --check .
	build/venv-newest/bin/lint-imports --no-logo --no-cache

build/venv-speed/ready: EXTRAS = plots
build/venv-newest/ready: EXTRAS = dev plots
build/venv-%/ready: RELEASES = $(NEWEST)
build/venv-oldest/ready: EXTRAS = dev plots
build/venv-oldest/ready: RELEASES = $(OLDEST)

build/venv-%/ready: pyproject.toml mlx_sinks.pth
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: Python 3.10 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(@D) || { \
	  echo "make: $(PYTHON) can't make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing mlx-sinks and $(lastword $(RELEASES)) in $(@D) …"
	@$(@D)/bin/python -m pip install $(PIP_OPTIONS) --editable '.[$(EXTRAS_LIST)]' $(RELEASES)
	@touch $@

clean:
	rm -rf build
