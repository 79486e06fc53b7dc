# Everything a person types. `make help` lists it.
BUILD ?= build
JOBS ?= $(shell nproc)
TYPE ?= Release
CUDA ?= AUTO
DEMO_PROMPT ?= What is 48 + 37?

.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory
.PHONY: help deps configure build demo chat serve test test-api test-page soak test-asan test-tsan fuzz bench gpu-check cuda-all check-layers check-instances check-manifest format format-check install dist check-dist clean

help:            ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps:            ## install missing distribution packages (says which; sudo only when not root)
	@scripts/install-deps.sh

configure: deps
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=$(TYPE) -DQUERN_CUDA=$(CUDA) $(CMAKE_FLAGS) >$(BUILD).log 2>&1 \
	  || { cat $(BUILD).log; rm -f $(BUILD).log; exit 1; }
	@grep -E '^-- quern:' $(BUILD).log || true
	@mv $(BUILD).log $(BUILD)/configure.log

build: configure ## build/quern
	@cmake --build $(BUILD) --target quern -j $(JOBS)

demo: build      ## the demo checkpoint answers a real prompt, and says what it sees
	@echo
	@echo '$$ $(BUILD)/quern run -p "$(DEMO_PROMPT)"'
	@$(BUILD)/quern run -p "$(DEMO_PROMPT)" --show-thinking always
	@echo
	@echo '$$ $(BUILD)/quern run --image models/demo/drawing.png -p "What do you see?"'
	@$(BUILD)/quern run --image models/demo/drawing.png -p "What do you see?"
	@echo
	@echo 'Chat with it:  $(BUILD)/quern run'

chat: build      ## interactive chat with the demo checkpoint
	@$(BUILD)/quern run

serve: build     ## answer clients at http://127.0.0.1:8080 with the demo checkpoint
	@$(BUILD)/quern serve

test: configure  ## build and run every test that needs no GPU
	@cmake --build $(BUILD) -j $(JOBS)
	@scripts/check_layers.sh
	@! test -x $(BUILD)/quern_launch_tests || scripts/run_tests.sh $(BUILD)/quern_launch_tests
	@scripts/run_tests.sh $(BUILD)/quern_tests --test-suite-exclude=perf,cuda

test-api: build  ## official and other clients against the server (installs them into a Python environment)
	@test -x build-venv/bin/python || python3 -m venv build-venv
	@build-venv/bin/pip install -q openai anthropic instructor litellm langchain-openai llm lm-eval transformers tenacity tiktoken
	@build-venv/bin/python tests/api_clients.py $(BUILD)/quern

test-page: build ## the web page in a headless Chromium (installs it; SKIPPED where it cannot); pictures in build/page-pictures
	@if QUERN_NO_INSTALL=$(QUERN_NO_INSTALL) scripts/install-deps.sh chromium chromium-driver python3; then \
	  QUERN_SCREENSHOTS=$(BUILD)/page-pictures python3 tests/page.py $(BUILD)/quern; \
	else echo "SKIPPED: Chromium cannot be installed here; the web page was not tested"; fi

SOAK_SECONDS ?= 600
soak: build      ## clients that come and go at every moment, for SOAK_SECONDS
	@python3 tests/soak.py $(BUILD)/quern $(SOAK_SECONDS)

test-asan:       ## the fast tests under AddressSanitizer and UndefinedBehaviorSanitizer (needs clang)
	@JOBS=$(JOBS) scripts/sanitized_build.sh quern_tests
	@UBSAN_OPTIONS=print_stacktrace=1 scripts/run_tests.sh build-asan/quern_tests --test-suite-exclude=perf,cuda,slow

# Without random addresses, where the kernel allows that: GCC's ThreadSanitizer cannot place itself otherwise.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
TSAN_SOAK_SECONDS ?= 20
THREADED_TESTS = main.cpp;demo_drafters.cpp;mtp.cpp;serve*.cpp;replica_states.cpp;engine.cpp;scheduler.cpp;prefix_cache.cpp;thread_pool.cpp;parallel.cpp;checkpoint.cpp;model_faults.cpp;ranks.cpp;ops/all_reduce_add.cpp;ops/sums_over_ranks.cpp;ops/second_backend.cpp
test-tsan: deps  ## what runs on several threads under ThreadSanitizer: engine, server, a short soak
	@cmake -S . -B build-tsan -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="-O1 -g1" -DQUERN_CUDA=OFF \
	  -DQUERN_SANITIZE=thread -DQUERN_TEST_FILES="$(THREADED_TESTS)" >/dev/null
	@cmake --build build-tsan -j $(JOBS)
	@TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/tests/tsan.supp" $(FIXED_ADDRESSES) scripts/run_tests.sh build-tsan/quern_tests --test-suite-exclude=perf,cuda,slow
	@TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/tests/tsan.supp" $(FIXED_ADDRESSES) python3 tests/soak.py --slow build-tsan/quern $(TSAN_SOAK_SECONDS) \
	  --synthetic tiny --mix xs -c 4096
	@TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/tests/tsan.supp" $(FIXED_ADDRESSES) python3 tests/soak.py --slow build-tsan/quern $(TSAN_SOAK_SECONDS) \
	  --synthetic tiny --mix xs -c 4096 --data-parallel 2

FUZZ_SECONDS ?= 60
fuzz:            ## libFuzzer targets, FUZZ_SECONDS each (needs clang)
	@scripts/fuzz.sh $(FUZZ_SECONDS)

bench: build     ## speed of the demo checkpoint on this machine
	@$(BUILD)/quern bench

gpu-check:       ## on a GPU machine, with the binaries in build/: all that needs a GPU, some 10 minutes
	@scripts/gpu_check.sh --bin $(BUILD)

CUDA_ALL ?= 80;86;89;90a;100a;120f
cuda-all: deps   ## build/cuda-all/quern with kernels for every supported GPU (needs nvcc, no GPU)
	@cmake -S . -B $(BUILD)/cuda-all -DCMAKE_BUILD_TYPE=$(TYPE) -DQUERN_CUDA=ON -DQUERN_TESTS=OFF \
	  -DQUERN_CUDA_ARCHITECTURES="$(CUDA_ALL)" >/dev/null
	@cmake --build $(BUILD)/cuda-all --target quern -j $(JOBS)

check-layers:    ## includes follow the layering
	@scripts/check_layers.sh

check-instances: build ## kernels that are products: at most as many as scripts/count_instances.sh says (SKIPPED without CUDA)
	@scripts/count_instances.sh $(BUILD) || [ $$? = 77 ]

check-manifest: build  ## scripts/kubernetes.yaml is proper YAML and its flags exist
	@scripts/install-deps.sh python3-yaml
	@python3 tests/manifest.py scripts/kubernetes.yaml $(BUILD)/quern

# Version 14 and no other: every version breaks some lines in other places.
SOURCE_FILES = git ls-files '*.cpp' '*.h' '*.cu' '*.cuh'
format:          ## clang-format on every source file
	@scripts/install-deps.sh clang-format-14
	@$(SOURCE_FILES) | xargs clang-format-14 -i

format-check:    ## fails if `make format` would change something (SKIPPED where version 14 cannot be installed)
	@if QUERN_NO_INSTALL=$(QUERN_NO_INSTALL) scripts/install-deps.sh clang-format-14; then \
	  $(SOURCE_FILES) | xargs clang-format-14 --dry-run -Werror; \
	else echo "SKIPPED: clang-format-14 cannot be installed here; formatting was not checked"; fi

PREFIX ?= /usr/local
install: build   ## quern and the demo checkpoint under PREFIX (/usr/local)
	@cmake --install $(BUILD) --prefix $(PREFIX)

dist: build      ## build/dist/quern-VERSION-linux-ARCH.tar.gz: what another machine needs to run quern
	@scripts/dist.sh $(BUILD)

check-dist: dist ## the packed binary answers from an empty folder, with an empty environment
	@scripts/check_dist.sh $(BUILD)/dist/quern-*.tar.gz

clean:           ## remove what was built
	rm -rf $(BUILD) build-asan build-tsan
