# The front door: `make help` lists the targets. Everything it does can also be done by hand with
# CMake's presets (`cmake --preset release && cmake --build --preset release`).
.DEFAULT_GOAL := help
.NOTPARALLEL:

PRESETS := release debug asan tsan clang

# make stress: for how long, in all.
STRESS_SECONDS ?= 600

.PHONY: help run test bench python wheel quality vllm llama outside sanitize stress coverage format lint clean setup setup-lint setup-python
.PHONY: setup-sanitize setup-coverage tool $(PRESETS)

help:  ## this list
	@echo "Gyre: the KV path of LLM inference. Targets:"
	@sed -n 's/^\([a-z]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18
	@echo "Build one preset only: make <$$(echo $(PRESETS) | tr ' ' '|')>; it lands in build/<preset>."

run: tool  ## build, then compare the cache formats on this machine; also writes build/report.html
	build/release/tools/gyre compare llama-3.1-8b --html build/report.html

test: release  ## build, then run the tests; ctest --preset release -C all runs those that take minutes, too
	ctest --preset release

bench: tool  ## build, then run every benchmark
	build/release/tools/gyre bench

python: setup-python  ## build the Python package and test it, in a virtual environment of its own: build/venv
	scripts/python.sh

wheel: setup-python  ## build a wheel with Highway inside and test it in an environment of its own; build/wheels
	scripts/wheel.sh

quality: setup-python  ## fetch a real model and print what each format costs it, with intervals; docs/quality.md
	scripts/quality.sh

vllm: setup-python  ## build the Python package for vLLM and compare its tokens with transformers'; docs/engines.md
	scripts/vllm.sh

llama: setup-python  ## fetch and build llama.cpp in build/llama, for libggml-gyre.so to be tested with; docs/llama_cpp.md
	scripts/llama.sh

outside: setup-python  ## run vLLM's own attention tests on the plugin, after make vllm; docs/engines.md
	scripts/outside.sh

sanitize: setup-sanitize  ## build and test with address + undefined, then thread sanitizer, then Valgrind
	scripts/sanitize.sh

stress: release  ## attack the library for STRESS_SECONDS (600) and print what was tried; docs/reliability.md
	scripts/stress.sh build/release $(STRESS_SECONDS)

coverage: setup setup-coverage  ## run every test and print line coverage of src/, and what did not run
	cmake --preset coverage --log-level=NOTICE
	cmake --build --preset coverage
	scripts/coverage.sh build/coverage

format: setup-lint  ## rewrite all C++ files in the project's format
	scripts/format.sh -i

lint: setup-lint  ## check documents, layers and format, then run clang-tidy; nothing is rewritten
	scripts/check_docs.sh
	scripts/check_layers.sh
	scripts/format.sh --dry-run -Werror
	cmake --preset clang --log-level=NOTICE
	scripts/tidy.sh build/clang

clean:  ## remove build/
	rm -rf build

setup:
	@scripts/setup.sh

setup-lint:
	@scripts/setup.sh lint

setup-python:
	@scripts/setup.sh python

setup-sanitize:
	@scripts/setup.sh sanitize

setup-coverage:
	@scripts/setup.sh coverage

tool: setup
	cmake --preset release --log-level=NOTICE
	cmake --build --preset release --target gyre_cli

clang: setup-lint

$(PRESETS): setup
	cmake --preset $@ --log-level=NOTICE
	cmake --build --preset $@
