# make build | test | test-slow | test-all | test-long | test-opinfo | test-upstream |
# test-upstream-distributed | test-interrupts | test-tpu-aot | test-cuda-aot | test-cuda | wheels | check-headers |
# docs | demo | bench | lint | format | clean
#
# Everything happens in .venv, made here when it is missing. Stamp files in it make repeated calls
# instant. PYTHON chooses the interpreter the environment is made from, JOBS how much is compiled or
# swept at a time.
#
# With TORCH or JAX, everything happens in a copy of the sources below build/versions/, which has an
# environment of its own: make test TORCH=2.15.0 JAX=0.12.0.1 PYTHON=python3.13

PYTHON ?= python3
JOBS ?= 2
PART ?= 1/1
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# What is run here unless TORCH and JAX say otherwise; torchvision is the one for that torch.
# TORCH_MINORS: those that wheels are built for. docs/versions.md says what else to change.
TORCH ?=
JAX ?=
OWN_TORCH := 2.13.0
OWN_JAX := 0.10.2
TORCH_MINORS := 2.13 2.14 2.15
PINNED := torch==$(or $(TORCH),$(OWN_TORCH)) $(foreach package,jax jaxlib jax-cuda13-pjrt,$(package)==$(or $(JAX),$(OWN_JAX)))
TORCHVISION := torchvision$(if $(TORCH),,==0.28.0)

CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h')
PYTHON_FILES := $(wildcard lazyxla lazyxla_autoload tests examples benchmarks tools)

.PHONY: build test test-slow test-all test-long test-opinfo test-upstream test-upstream-distributed test-interrupts \
  test-tpu-aot test-cuda-aot test-cuda wheels check-headers docs demo bench lint format clean copy
.DELETE_ON_ERROR:

# IN_COPY: this is make in the copy.
ifneq ($(if $(IN_COPY),,$(TORCH)$(JAX)),)
COPY := build/versions/torch-$(or $(TORCH),$(OWN_TORCH))-jax-$(or $(JAX),$(OWN_JAX))-$(notdir $(PYTHON))

$(or $(MAKECMDGOALS),build): copy
	+$(MAKE) -C $(COPY) IN_COPY=1 $@

copy:
	$(PYTHON) tools/copy_sources.py $(COPY)
else

build: $(VENV)/.installed

$(PY):
	$(PYTHON) -m venv $(VENV)

# torchvision asks for the exact torch it was built with; --no-deps keeps pip from replacing ours.
$(VENV)/.dependencies: pyproject.toml | $(PY)
	$(PIP) install -q $(PINNED) numpy pillow
	$(PIP) install -q --no-deps $(TORCHVISION)
	$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  e = p["optional-dependencies"]; d = p["dependencies"] + e["test"] + e["lint"] + e["docs"] + e["dev"]; \
	  print(*[r for r in d if not r.startswith("lazyxla")], sep="\n")' > $(VENV)/requirements.txt
	$(PIP) install -q $(PINNED) -r $(VENV)/requirements.txt
	touch $@

# PATH: cmake and ninja are those of the environment.
$(VENV)/.installed: $(VENV)/.dependencies CMakeLists.txt $(CXX_FILES) $(shell find csrc -type d)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  $(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

# Ten minutes on two cores. It leaves out the tests in tests/slow_tests.txt: test-slow runs them, or a
# part (PART=1/4), and test-all everything.
test: build
	$(PY) -m pytest -n 2 --slow 0/1 tests

test-slow: build
	$(PY) -m pytest -n 2 --slow $(PART) tests

test-all: build
	$(PY) -m pytest -n 2 --durations 20 tests

# What is tried at random or from several threads, more often.
test-long: build
	$(PY) -m pytest -n 2 --programs 3000 --thread-rounds 100 --cache-rounds 200 --exits 40 \
	  --shapes 20000 --faults 200 --every-size --steps 500 tests/test_distributed.py tests/test_random_programs.py tests/test_threads.py \
	  tests/test_cache_damage.py tests/test_exit.py tests/test_bounds.py tests/test_captured_steps_random.py \
	  "tests/test_spmd.py::test_on_eight_devices[cases_random.py]" \
	  "tests/test_spmd.py::test_on_eight_devices[cases_threads.py]" \
	  "tests/test_spmd.py::test_on_eight_devices[cases_interrupts.py]" \
	  "tests/test_spmd.py::test_on_eight_devices[cases_failures.py]"

# Everything in PyTorch's operator table; OPINFO passes options such as --shard 0/4.
test-opinfo: build
	$(PY) -m tests.opinfo.sweep --jobs $(JOBS) --docs $(OPINFO)

# PyTorch's own device tests, from Debian's source package; UPSTREAM passes options such as
# --files test_view_ops --shard 0/4.
test-upstream: build
	$(PY) -m tests.upstream $(UPSTREAM)

# Those for many processes: DTensor, FSDP2, functional collectives, device meshes, checkpoints; four
# processes on the CPU. UPSTREAM as above, such as --files test_device_mesh; --spanning shares a client
# between the processes, as on TPUs and GPUs.
test-upstream-distributed: build
	OMP_NUM_THREADS=1 $(PY) -m tests.upstream.distributed $(UPSTREAM)

# Ctrl-C at 300 random moments of training, in every mode.
test-interrupts: build
	$(PY) -m tests.interrupts --count 300

# All lowering rules, and training steps of whole models, through the TPU's compiler, without a TPU;
# AOT passes options to the first, such as --dtypes bfloat16, TRAINING to the second, such as
# --models decoder --topologies v5e:2x2. The second takes about an hour for all.
test-tpu-aot: build
	$(PY) -m tests.aot.sweep $(AOT)
	$(PY) -m tests.aot.training $(TRAINING)

# The same for an H100, through the compiler in CUDA's plugin; without a GPU.
test-cuda-aot: build
	$(PY) -m tests.aot.sweep --topology h100 $(AOT)
	$(PY) -m tests.aot.training --topologies h100 $(TRAINING)

# What holds on a GPU, and its step times beside PyTorch's own, for which TORCH has to be a CUDA build.
test-cuda: build
	LAZYXLA_PLATFORM=cuda LAZYXLA_CREATE_OPTIONS=preallocate=false $(PY) -m pytest -n 8 -m cuda tests
	$(PY) benchmarks/run.py --only training --device cuda --autocast --rounds 1

# A wheel in dist/ for each minor release of torch and this Python. Such a build needs no CUDA: of torch
# only its headers and libraries, without what it depends on.
wheels: $(TORCH_MINORS:%=wheel-torch-%)

wheel-torch-%:
	$(PYTHON) -m venv build/wheels/torch-$*
	build/wheels/torch-$*/bin/python -m pip install -q --no-deps 'torch==$*.*' jaxlib==$(or $(JAX),$(OWN_JAX))
	build/wheels/torch-$*/bin/python -m pip install -q 'scikit-build-core>=1.0' cmake ninja xla-cpu-pjrt
	PATH="$(CURDIR)/build/wheels/torch-$*/bin:$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  build/wheels/torch-$*/bin/python -m pip wheel -q --no-build-isolation --no-deps -w dist \
	  -C build-dir=build/wheels/torch-$*/build .

# Whether csrc/ compiles against the headers of torch that no wheel is built for; makes no code.
check-headers: build
	$(PY) tools/check_headers.py --jobs $(JOBS) $(or $(TORCH_HEADERS),2.11.0 2.12.0)

# The API reference, as HTML in build/docs, and the pages that are written from the code.
docs: build
	$(PY) -m tests.settings_table
	$(PY) -m tests.operator_table
	$(PY) -m tools.api_reference build/docs

demo: build
	$(PY) examples/train_decoder.py --small

bench: build
	$(PY) benchmarks/run.py

# Needs the tools only, not the extension.
lint: $(VENV)/.dependencies
	$(PY) -m ruff check $(PYTHON_FILES)
	$(PY) -m ruff format --check $(PYTHON_FILES)
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(PY) -m mypy

format: $(VENV)/.dependencies
	$(PY) -m ruff check --fix $(PYTHON_FILES)
	$(PY) -m ruff format $(PYTHON_FILES)
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist lazyxla/_C*.so $(VENV)/.installed

endif
