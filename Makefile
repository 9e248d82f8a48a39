# One entry for each task, the same at the desk and in CI. `make test` and `make demo` start from nothing but Python,
# a C++ compiler and PyPI.
#
#   PYTHON   the interpreter that makes .venv
#   TORCH    what pip installs as torch; the default is the version the project is tested with
#   TESTS    what `make aarch64` tells pytest
#   TRITON   what pip installs as triton where torch brings none; empty: its kernels' tests are skipped

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= $(if $(filter Linux,$(shell uname)),triton==3.6.0)
TESTS ?= tests/ops --backend cpu --every 11
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install -q --no-compile  # Python compiles what it imports; all of torch took half of the time
SOURCES := $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/simt/*.cpp' 'tests/simt/*.cu' 'tests/simt/*.h' \
  'tests/ptx/*.cpp' 'tests/ptx/*.h')
SANITIZED := build/sanitized
# hundreds of processes import torch: 3.5 seconds where its bytecode is kept, 8 where each compiles it
unexport PYTHONDONTWRITEBYTECODE

.PHONY: build triton lint test test-all rest ops patched simt aside ptx ptx-attention interpreted interpreted-attention \
  sanitize sanitized-cpu sanitized-cuda aarch64 macos demo bench gpu clean

$(VENV)/deps: setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -U pip "setuptools>=70.1"
	$(INSTALL) $(TORCH) ninja pybind11
	touch $@

# -e: what is tested is the checkout; ninja compiles again only what changed
build: $(VENV)/deps
	$(INSTALL) --no-build-isolation -e '.[dev,demo,train,plot,export]'

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(BIN)/mypy

triton: build
	$(BIN)/python -c "import importlib.util as u; raise SystemExit(u.find_spec('triton') is None)" \
	  || test -z "$(TRITON)" || $(INSTALL) $(TRITON)

# Two processes at a time, what takes longest first; what Triton and the machine run needs one thread. Triton's kernels
# run interpreted in processes of their own. Exit code 5 says that triton is not installed.
test test-all: lint triton
	$(MAKE) -j2 MARKED='$(MARKED)' ptx ptx-attention simt aside rest patched interpreted interpreted-attention ops

test: MARKED := -m "not slow"
PYTEST := $(BIN)/python -m pytest -q
SIMT := tests/simt
ASIDE := $(addprefix tests/,aot commands generation models training)
PTX := tests/ptx
INTERPRETED := tests/interpreter
PATCHED := tests/patching
OPS := tests/ops
# threads of one process that wait for each other leave the cores to the other process
rest ops patched: export OMP_WAIT_POLICY := PASSIVE
simt ptx-attention ptx aside interpreted-attention interpreted: export OMP_NUM_THREADS := 1
interpreted-attention interpreted: export TRITON_INTERPRET := 1

rest:
	$(PYTEST) $(MARKED) $(addprefix --ignore=,$(SIMT) $(ASIDE) $(PTX) $(INTERPRETED) $(PATCHED) $(OPS))

ops:
	$(PYTEST) $(MARKED) $(OPS)

patched:
	$(PYTEST) $(MARKED) $(PATCHED)

simt:
	$(PYTEST) $(MARKED) $(SIMT)

aside:
	$(PYTEST) $(MARKED) $(ASIDE)

ptx-attention:
	$(PYTEST) $(MARKED) $(PTX)/test_attention*.py || test $$? -eq 5

ptx:
	$(PYTEST) $(MARKED) $(PTX) --ignore-glob='$(PTX)/test_attention*.py' || test $$? -eq 5

interpreted-attention:
	$(PYTEST) $(MARKED) $(INTERPRETED)/test_attention*.py || test $$? -eq 5

interpreted:
	$(PYTEST) $(MARKED) $(INTERPRETED) --ignore-glob='$(INTERPRETED)/test_attention*.py' || test $$? -eq 5

# the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the tree, and the CUDA kernels,
# run on the CPU; -O1 compiles in a quarter of the time, and what this processor does not run is left out
sanitize: $(VENV)/deps
	$(MAKE) -j2 sanitized-cpu sanitized-cuda

sanitized-cpu:
	rm -rf $(SANITIZED)/tfm_kernels $(SANITIZED)/csrc $(SANITIZED)/tests
	mkdir -p $(SANITIZED)
	git ls-files setup.py csrc tfm_kernels tests | tar cf - -T - | tar xf - -C $(SANITIZED)
	sed -i.bak 's/-O[23]/-O1/' $(SANITIZED)/setup.py
	cd $(SANITIZED) && CXX="c++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -g1" \
	  TFM_KERNELS_CUDA_ARCHS= MAKEFLAGS= \
	  TFM_KERNELS_ISAS="$$($(abspath $(BIN))/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')" \
	  $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=PASSIVE $(abspath $(BIN))/python -m tests.sanitized

sanitized-cuda:
	$(BIN)/python -m tests.simt.sanitized

# the C++ kernels built for aarch64 and tested by emulation; what it needs and costs is said in the script
aarch64: $(VENV)/deps
	PYTHON=$(abspath $(BIN))/python TORCH=$(TORCH) tests/aarch64.sh $(TESTS)

# compiled and linked for a Mac, not run
macos: $(VENV)/deps
	PYTHON=$(abspath $(BIN))/python TORCH=$(TORCH) tests/macos.sh

# it runs on the CPU: where there is no GPU it does not wait for nvcc
demo: $(VENV)/deps
	$(if $(wildcard /dev/nvidia0 tfm_kernels/_cuda*.so),,TFM_KERNELS_CUDA_ARCHS=) \
	  $(INSTALL) --no-build-isolation -e '.[demo,plot]'
	$(BIN)/python -m tfm_kernels.demo

bench: build
	$(BIN)/python -m bench

# needs nothing but what this Python has: torch with CUDA, triton, pytest; 8 minutes of a GPU
gpu:
	$(PYTHON) -m bench.gpu

clean:
	rm -rf build dist $(VENV) *.egg-info tfm_kernels/*.so
