# The two commands of the README are `make demo` and `make test`; every target may be run again and skips what is done.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

PRESET ?= release
BUILD := build/$(PRESET)
JOBS ?= $(shell scripts/jobs.sh)
ENV := . .deps/env.sh
SOURCES = $(shell git ls-files 'src/*.cc' 'src/*.h' 'tests/*.cc' 'tests/*.h' 'bench/*.cc' 'examples/*.cc')

.PHONY: help setup configure build all demo test test-all bench format tidy clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## */  make \1|/' | column -t -s '|'

setup:  ## install what is missing (packages, libtorch)
	@scripts/setup.sh

configure: setup
	@mkdir -p build; $(ENV); cmake --preset $(PRESET) -DWEFT_TORCH="$$WEFT_TORCH" >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

build: configure  ## compile the library and the command weft
	@$(ENV); cmake --build --preset $(PRESET) -j $(JOBS) --target weft_command

all: configure  ## compile everything, tests, benchmarks and examples included
	@$(ENV); cmake --build --preset $(PRESET) -j $(JOBS)

demo: export WEFT_DEMO = 1
demo: build  ## train a language model on two ranks, five minutes
	@scripts/demo.sh

test: configure  ## the quick tests
	@$(ENV); cmake --build --preset $(PRESET) -j $(JOBS) --target weft_quick_tests
	@$(ENV); cd $(BUILD); ctest -L quick -j $(JOBS) --output-on-failure --no-tests=error

test-all: all  ## every test but those of real launchers and of the set-up (ctest -L launchers, -L setup)
	@$(ENV); cd $(BUILD); ctest -LE "launchers|setup" -j $(JOBS) --output-on-failure --no-tests=error

bench: all  ## the benchmarks
	@shopt -s nullglob; for program in $(BUILD)/bin/bench_*; do echo "== $$program"; "$$program"; done

format:  ## clang-format over all sources
	@clang-format -i $(SOURCES)

tidy: all  ## clang-tidy over all sources
	@clang-tidy -quiet -p $(BUILD) $(filter src/%.cc,$(SOURCES))

clean:  ## remove what was built; downloads stay in .deps
	@rm -rf build
