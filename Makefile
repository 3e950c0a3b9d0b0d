# The few commands of the README. Each installs what it needs first (tools/setup.sh).
.PHONY: help demo build test lint format fuzz bench clean setup setup-test

PYTHON := .venv/bin/python
# Whatever the wheel is made of: a change here rebuilds and reinstalls it.
PACKAGE_SOURCES := $(shell find include src ort python cmake CMakeLists.txt pyproject.toml tools/get_onnxruntime_headers.sh \
                     -type f -not -path '*/__pycache__/*' 2>/dev/null)

help:
	@echo "make demo    set up everything and generate text from a small model (SmolLM2-135M-Instruct)"
	@echo "make build   build the library and install the Python package into .venv"
	@echo "make test    everything that is checked: builds, tests, sanitizers, lint"
	@echo "make lint    formatting, clang-tidy, ruff, layers, generated documents"
	@echo "make format  format all C++ and Python files"
	@echo "make fuzz    fuzz for FUZZ_SECONDS (default 600) a target under the sanitizers"
	@echo "make bench   run the benchmarks, results in build/bench.json"
	@echo "make clean   remove build/ and .venv/"

setup:
	@sh tools/setup.sh build

setup-test:
	@sh tools/setup.sh test

demo: build
	@sh tools/setup.sh demo
	@.venv/bin/octavo demo

build: setup .venv/octavo-package.stamp

.venv/octavo-package.stamp: $(PACKAGE_SOURCES) | setup
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
	@touch $@

test: setup-test
	@$(PYTHON) tools/run_tests.py

lint: setup-test
	@$(PYTHON) tools/run_tests.py --only lint

format: setup-test
	@$(PYTHON) tools/format_sources.py
	@.venv/bin/ruff check --quiet --fix-only . && .venv/bin/ruff format --quiet .

fuzz: setup-test
	@$(PYTHON) tools/run_tests.py --only fuzz --fuzz-seconds $(or $(FUZZ_SECONDS),600)

bench: setup-test
	cmake --preset dev
	cmake --build --preset dev --target octavo_bench
	build/dev/bench/octavo_bench --benchmark_out=build/bench.json --benchmark_out_format=json

clean:
	rm -rf build .venv
