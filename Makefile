# gradd: one non-recursive makefile. Everything that is built lands in $(B); nothing generated is
# committed. `make help` lists the targets; variables below can be set on the command line.

B         ?= build
CC        := $(if $(filter default,$(origin CC)),gcc,$(CC))
CXX       := $(if $(filter default,$(origin CXX)),g++,$(CXX))
NVCC      ?= nvcc
CUDA_HOME ?= /usr/local/cuda
PKG_CONFIG ?= pkg-config
WERROR    ?= 1
DEBUG     ?= 0
ASAN      ?= 0
UBSAN     ?= 0
TSAN      ?= 0
V         ?= 0
VENV      := .venv
PY        := $(VENV)/bin/python
MACHINE   := $(shell uname -m)
# x86-64-v3 (AVX2, FMA, F16C) runs on every server and laptop of the last ten years; wider code goes
# behind target_clones in single kernels, so a binary may always be copied to another machine.
ARCH      ?= $(if $(filter x86_64,$(MACHINE)),-march=x86-64-v3)
Q         := $(if $(filter 1,$(V)),,@)

# This tree's adapters, also where several work trees share one .venv.
export PYTHONPATH := $(CURDIR)/adapters/python:$(CURDIR)/adapters/optimum

comma     := ,

.DEFAULT_GOAL := all
.SUFFIXES:
.DELETE_ON_ERROR:

# ---------------------------------------------------------------- setup (runs by itself when missing)
# $(SETUP) is an included makefile: when it is missing or older than the lists of packages, make runs
# its rule first and then starts over, so that everything below sees the finished installation.
SETUP := $(VENV)/gradd-setup.mk
NO_SETUP_GOALS := clean help setup
ifneq ($(filter-out $(NO_SETUP_GOALS),$(or $(MAKECMDGOALS),all)),)
include $(SETUP)
endif
$(SETUP): tools/setup.sh constraints.txt requirements.txt requirements-dev.txt
	@sh tools/setup.sh $(VENV)

# ---------------------------------------------------------------- libraries
ZMQ_CFLAGS  := $(shell $(PKG_CONFIG) --cflags libzmq 2>/dev/null)
ZMQ_LIBS    := $(or $(shell $(PKG_CONFIG) --libs libzmq 2>/dev/null),-lzmq)
MSGPACK_PC  := $(shell for p in msgpack-c msgpack; do $(PKG_CONFIG) --exists $$p 2>/dev/null && echo $$p && break; done)
MSGPACK_CFLAGS := $(if $(MSGPACK_PC),$(shell $(PKG_CONFIG) --cflags $(MSGPACK_PC)))
MSGPACK_LIBS   := $(or $(if $(MSGPACK_PC),$(shell $(PKG_CONFIG) --libs $(MSGPACK_PC))),-lmsgpackc)
PROTO_CFLAGS := $(shell $(PKG_CONFIG) --cflags libprotobuf-c 2>/dev/null)
PROTO_LIBS   := $(or $(shell $(PKG_CONFIG) --libs libprotobuf-c 2>/dev/null),-lprotobuf-c)

# oneDNN 3.x: pkg-config, then a system header, then the Python packages in the virtual environment.
# ONEDNN=none builds with gradd's own blocked product only.
ONEDNN ?= auto
dnnl_major = $(shell printf '\043include <dnnl.h>\nDNNL_MAJOR_IS DNNL_VERSION_MAJOR\n' | \
             $(CC) $(1) -E -x c - 2>/dev/null | sed -n 's/^DNNL_MAJOR_IS \([0-9]*\)$$/\1/p')
ifeq ($(ONEDNN),auto)
ifeq ($(shell $(PKG_CONFIG) --atleast-version=3 dnnl 2>/dev/null && echo yes),yes)
DNNL_FOUND  := system, pkg-config
DNNL_CFLAGS := $(shell $(PKG_CONFIG) --cflags dnnl)
DNNL_LIBS   := $(shell $(PKG_CONFIG) --libs dnnl)
else ifeq ($(call dnnl_major,),3)
DNNL_FOUND  := system header
DNNL_LIBS   := -ldnnl
else ifneq ($(wildcard $(VENV)/include/dnnl.h $(VENV)/lib/libdnnl.so.3),)
ifeq ($(call dnnl_major,-I$(VENV)/include),3)
DNNL_FOUND  := $(VENV)
DNNL_CFLAGS := -isystem $(VENV)/include
DNNL_LIBS   := $(VENV)/lib/libdnnl.so.3 -Wl,-rpath,$(abspath $(VENV)/lib)
endif
endif
endif
ifeq ($(DNNL_FOUND),)
DNNL_CFLAGS := -DGRADD_NO_ONEDNN
endif

# ---------------------------------------------------------------- flags
# -ffp-contract=off: a*b+c is rounded as it is written, whatever the compiler vectorises or inlines,
# so the plain reference and a faster version, or a loop's body and its tail, give the same bits.
# Kernels that want a fused multiply-add say fmaf. Errno and trap semantics of libm are not used.
OPTIMISE := $(if $(filter 1,$(DEBUG)),-O0 -g3,-O3 -g)
SANITIZE := $(if $(filter 1,$(ASAN)),-fsanitize=address) \
            $(if $(filter 1,$(UBSAN)),-fsanitize=undefined -fno-sanitize-recover=undefined) \
            $(if $(filter 1,$(TSAN)),-fsanitize=thread)
SANITIZE := $(strip $(SANITIZE))
ifneq ($(SANITIZE),)
OPTIMISE := -O1 -g -fno-omit-frame-pointer
endif
HARDEN   := $(if $(SANITIZE)$(filter 1,$(DEBUG)),,-D_FORTIFY_SOURCE=2) -fstack-protector-strong
# maybe-uninitialized depends on what this compiler version inlines and does not see through the
# house idiom (results are written only on success): it warns, but does not stop the build.
WARN     := -Wall -Wextra -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
            $(if $(filter 1,$(WERROR)),-Werror -Wno-error=maybe-uninitialized) \
            $(if $(SANITIZE),-Wno-maybe-uninitialized)
CPPFLAGS_ALL = -D_GNU_SOURCE -I. -I$(B)/gen $(ZMQ_CFLAGS) $(MSGPACK_CFLAGS) $(PROTO_CFLAGS) \
               $(DNNL_CFLAGS) $(CPPFLAGS)
CFLAGS_ALL   = -std=gnu11 $(OPTIMISE) $(ARCH) -fopenmp -fPIC -ffp-contract=off -fno-math-errno \
               -fno-trapping-math $(HARDEN) $(SANITIZE) $(CFLAGS)
# Kernels of GPUs as C++ for the host: the words of CUDA are ordinary functions there (tests/emu/emu.h).
CXXFLAGS_ALL = -std=gnu++20 $(if $(SANITIZE),$(OPTIMISE),-O1 -g) $(ARCH) -fPIC -ffp-contract=off \
               -fno-math-errno -fno-trapping-math -fno-exceptions -fno-rtti -Itests/emu $(SANITIZE) \
               -Wall -Wno-unknown-pragmas -Wno-deprecated-enum-enum-conversion \
               $(if $(filter 1,$(WERROR)),-Werror) $(CXXFLAGS)
# The build id tells a client that the daemon is older than the binary (server/daemon/build.h).
LDFLAGS_ALL  = $(SANITIZE) -fopenmp -Wl,-z,relro,-z,now -Wl,--build-id=sha1 $(LDFLAGS)
# A plug-in finds in the program, which holds the whole engine, what it needs of gradd.
PLUGIN_HOST  = -Wl,--export-dynamic-symbol='gradd_*'
ENGINE_LIBS  = $(DNNL_LIBS) $(PROTO_LIBS) -ldl -lpthread -lm
DAEMON_LIBS  = $(ZMQ_LIBS) $(MSGPACK_LIBS) $(ENGINE_LIBS)

# ---------------------------------------------------------------- sources: found, never listed
SHM_SRC    := $(sort $(wildcard shm/*.c))
KERNEL_SRC := $(sort $(wildcard kernels/*.c kernels/*/*.c kernels/*/*/*.c))
ENGINE_SRC := $(sort $(wildcard server/graph/*.c server/graph/*/*.c server/plan/*.c \
                                server/plan/passes/*.c server/device/*.c server/exec/*.c))
DAEMON_SRC := $(sort $(wildcard server/host/*.c server/wire/*.c server/session/*.c \
                                server/explain/*.c server/verbs/*.c server/daemon/*.c server/cli/*.c))
TEST_SRC   := $(sort $(wildcard tests/c/*/test_*.c))
# Names of test modules are unique whatever their room, so an object or a runner is found by name.
test_name   = $(patsubst test_%.c,%,$(notdir $(1)))
test_obj    = $(call obj,$(filter %/test_$(1).c,$(TEST_SRC)))
PEER_SRC   := tests/c/peer.c
FAKE_SRC   := $(sort $(wildcard tests/fake/*.c))
# Kernels of GPUs, and what runs them on the host (tests/emu).
CUDA_SRC   := $(sort $(filter-out kernels/cuda/plugin/%,$(wildcard kernels/cuda/*.cu kernels/cuda/*/*.cu)))
EMU_SRC    := $(sort $(wildcard tests/emu/*.cc))
TEST_HELP_SRC := $(sort $(filter-out $(TEST_SRC) $(PEER_SRC),$(wildcard tests/c/*.c)))
PROTO      := $(wildcard server/graph/onnx.proto)
PB_C       := $(PROTO:%.proto=$(B)/gen/%.pb-c.c)

obj = $(patsubst %.c,$(B)/%.o,$(1))
PB_OBJ     := $(PB_C:$(B)/gen/%.c=$(B)/gen-obj/%.o)
SHM_OBJ    := $(call obj,$(SHM_SRC))
ENGINE_OBJ := $(SHM_OBJ) $(call obj,$(KERNEL_SRC) $(ENGINE_SRC)) $(PB_OBJ)
DAEMON_OBJ := $(call obj,$(DAEMON_SRC))
# The devices of the tests, and the list of devices with them in place of the library's own.
EMU_OBJ    := $(CUDA_SRC:%.cu=$(B)/emu/%.o) $(EMU_SRC:%.cc=$(B)/%.o)
FAKE_OBJ   := $(call obj,$(FAKE_SRC)) $(EMU_OBJ) $(B)/fake/devices.o
TEST_OBJ   := $(call obj,$(TEST_SRC) $(TEST_HELP_SRC) $(PEER_SRC))
FUZZ_ALL_OBJ := $(call obj,$(wildcard tests/fuzz/*.c) tests/c/onnx_build.c)
ALL_OBJ    := $(ENGINE_OBJ) $(DAEMON_OBJ) $(TEST_OBJ) $(FAKE_OBJ) $(FUZZ_ALL_OBJ) $(B)/benchmarks/bench_ipc.o $(B)/benchmarks/bench_engine.o
# The runner holds the daemon's modules too, except the one with main().
TESTED_DAEMON_OBJ := $(filter-out $(B)/server/cli/main.o,$(DAEMON_OBJ))

LIBS := $(B)/lib/libgradd_shm.a $(B)/lib/libgradd_shm.so $(B)/lib/libgradd.a $(B)/lib/libgradd.so
BIN  := $(B)/bin/gradd
FAKE := $(B)/bin/gradd-fake

# ---------------------------------------------------------------- targets
.PHONY: all versions cuda cuda-deps gpu-bundle setup test nightly check check-asan check-tsan check-emu demo bench families fuzz fuzz-quick fuzz-bins format lint docs clean help unit \
        info FORCE

all: $(LIBS) $(BIN) ## build libraries and daemon (sets up first when needed)

setup: ## install what is missing: system packages, .venv, Python packages (repeatable)
	@sh tools/setup.sh $(VENV)

test: all $(B)/bin/tests $(FAKE) fuzz-bins ## every test: layers, sizes, C, mutated input, Python with a real daemon
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tests/run_all.py --build $(B)

nightly: all ## long property tests, parity per switch (ONLY="FILES SWITCHES"), hours; kept in benchmarks/results/nightly.txt
	@GRADD_BIN=$(abspath $(B)/bin/gradd) nice $(PY) tests/run_all.py --build $(B) --nightly benchmarks/results/nightly.txt $(if $(ONLY),--only $(ONLY))

check: lint all $(B)/bin/tests $(FAKE) ## the inner loop, a minute: lint, layers, sizes, C, quick Python
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tests/run_all.py --build $(B) --quick

versions: all ## example and quick Python tests under other versions of torch and Python (ONLY="2.14-3.13"), some GB each
	@$(PY) tools/versions.py --build $(B) $(if $(ONLY),--only $(ONLY))

# Leaks count as well: a daemon that leaks ends with a status that its test refuses. Time limits and
# budgets are stretched; only Python tests that talk to a daemon run, for a library of this kind cannot
# be loaded into Python.
ASAN_ENV := ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1:detect_leaks=1 \
            UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2
ASAN_PY  := daemon/test_hostile.py values/test_gradients.py calls/test_optim.py
check-asan: ## C tests and hostile input under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) --no-print-directory ASAN=1 UBSAN=1 B=$(B)/asan $(B)/asan/bin/gradd $(B)/asan/bin/tests
	@$(ASAN_ENV) GRADD_BIN=$(abspath $(B))/asan/bin/gradd $(B)/asan/bin/tests --limit-scale 6
	@$(ASAN_ENV) GRADD_BUILD=$(abspath $(B))/asan GRADD_TEST_SLOWER=20 \
	 $(PY) -m pytest -q $(ASAN_PY:%=tests/python/%)

# Fibers keep their stacks while others run, which a check of uses after return cannot follow. The
# sanitizers take twice the time; the limits are for a machine that does much else.
EMU_TESTS := $(filter test_emu%,$(basename $(notdir $(TEST_SRC))))
EMU_ENV   := $(subst use_after_return=1,use_after_return=0,$(ASAN_ENV))
check-emu: ## kernels of GPUs, emulated: under sanitizers, and with planted bugs (half an hour)
	@$(MAKE) --no-print-directory ASAN=1 UBSAN=1 B=$(B)/asan $(EMU_TESTS:%=$(B)/asan/bin/%)
	@for t in $(EMU_TESTS); do echo "  RUN     $$t"; $(EMU_ENV) $(B)/asan/bin/$$t --limit-scale 20 || exit 1; done
	@$(PY) tests/emu/mutants.py

# gcc's OpenMP runtime is not instrumented and would be reported for every parallel loop, so only the
# modules with threads of their own run here.
TSAN_MODULES := status. handle. lease. queue. session. spans.
check-tsan: ## C tests of modules with threads of their own under ThreadSanitizer
	@$(MAKE) --no-print-directory TSAN=1 B=$(B)/tsan $(B)/tsan/bin/tests
	@TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 OMP_NUM_THREADS=1 $(B)/tsan/bin/tests --limit-scale 10 \
	 $(TSAN_MODULES:%=--filter %)

# Fuzzing. With clang the whole engine is built once more with coverage and sanitizers (one thread:
# tests/fuzz/serial/omp.h) and libFuzzer runs each target. Without it gcc's sanitizers and a driver
# that mutates blindly (tests/fuzz/standalone.c) stand in. clang's pointer-overflow is off: it objects
# to NULL plus an offset, which kernels form, and never use, for tensors and scratch without bytes.
# Findings and corpora stay in $(B)/fuzz.
FUZZ_RUNS    ?= 100000
FUZZ_CC      ?= clang
FUZZ_TARGETS ?= wire handle import
FUZZ_MAX     := -max_len=16384 -timeout=20 -rss_limit_mb=2048
FUZZ_HELP    := $(filter-out tests/fuzz/fuzz_%.c tests/fuzz/standalone.c,$(wildcard tests/fuzz/*.c)) \
                tests/c/onnx_build.c
FUZZ_O       := $(B)/fuzz/obj
HAVE_FUZZER  := $(shell command -v $(FUZZ_CC) 2>/dev/null)
FUZZ_MAKE     = $(MAKE) --no-print-directory B=$(FUZZ_O) ASAN=1 UBSAN=1
ifneq ($(HAVE_FUZZER),)
FUZZ_MAKE    += CC=$(FUZZ_CC) CFLAGS='-fsanitize=fuzzer-no-link -fno-openmp -isystem tests/fuzz/serial -w \
                      -fno-sanitize=pointer-overflow' \
                LDFLAGS='-fsanitize=fuzzer -fno-openmp'
FUZZ_RUN      = -runs=$(FUZZ_RUNS) $(FUZZ_MAX) -print_final_stats=1 ../corpus_$(1)
else
FUZZ_RUN      = -runs=$(FUZZ_RUNS)
endif
fuzz: ## mutated input for FUZZ_TARGETS="wire handle import", FUZZ_RUNS=100000 each (clang, or gcc)
	$(if $(HAVE_FUZZER),,@echo "*** $(FUZZ_CC) is not installed: NO COVERAGE, the mutations are blind ***")
	@$(FUZZ_MAKE) $(FUZZ_TARGETS:%=$(FUZZ_O)/bin/fuzz_%)
	@for t in $(FUZZ_TARGETS); do $(MAKE) --no-print-directory fuzz-run-$$t || exit 1; done
fuzz-run-%:
	@mkdir -p $(B)/fuzz/$* $(B)/fuzz/corpus_$*; echo "  FUZZ    fuzz_$*, $(FUZZ_RUNS) executions"
	@GRADD_FUZZ_SEEDS=$(B)/fuzz/corpus_$* $(FUZZ_O)/bin/fuzz_$*
	@cd $(B)/fuzz/$* && OMP_NUM_THREADS=1 GRADD_LOG=error ASAN_OPTIONS=quarantine_size_mb=32 \
	    ../obj/bin/fuzz_$* $(call FUZZ_RUN,$*)

demo: all ## train a small Llama through the daemon, next to plain Trainer
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) -m optimum.gradd.demo $(ARGS)

bench: all ## measure against torch eager and torch.compile
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) benchmarks/run.py $(ARGS)

C_FILES = $(shell find shm kernels server tests benchmarks \( -name '*.[ch]' -o -name '*.cu' \
                       -o -name '*.cuh' \) 2>/dev/null | sort)
format: ## rewrite all sources in the house format
	$(Q)$(VENV)/bin/clang-format -i $(C_FILES)
	$(Q)$(VENV)/bin/ruff format -q . && $(VENV)/bin/ruff check -q --fix .

lint: ## formatting and static checks, changes nothing
	$(Q)$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(Q)$(VENV)/bin/ruff format -q --check . && $(VENV)/bin/ruff check -q .
	$(Q)$(PY) tests/check_layers.py && $(PY) tests/check_operands.py && $(PY) tests/check_imports.py && $(PY) tests/check_sizes.py
	$(Q)$(PY) tests/check_pages.py && $(PY) tests/check_words.py

docs: $(BIN) ## rewrite the pages that are made from lists: operators, kernels, patterns, options
	@$(PY) tools/docs.py $(BIN)

# Families that $(B)/families.jsonl holds already are not run again: remove it to start over.
families: all ## try every text family of transformers (an hour), write docs/families.md
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tools/families.py $(B)/families.jsonl
	@$(PY) tools/families.py $(B)/families.jsonl --page docs/families.md

clean: ## remove build output (keeps .venv)
	rm -rf $(B)

info: ## what the build found
	@echo "compiler  $(CC) $$($(CC) -dumpfullversion), $(MACHINE), $(OPTIMISE) $(ARCH) $(SANITIZE)"
	@echo "oneDNN    $(or $(DNNL_FOUND),not found: own blocked product)"
	@echo "msgpack   $(or $(MSGPACK_PC),not found by pkg-config)"
	@echo "CUDA      $(if $(wildcard $(CUDA_HOME)/include/cuda.h),headers in $(CUDA_HOME),no (no $(CUDA_HOME)/include/cuda.h): CPU only)"

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	 while IFS='|' read -r t d; do printf '%-14s %s\n' "$$t" "$$d"; done
	@echo "  variables: B CC NVCC CUDA_HOME ARCH DEBUG ASAN UBSAN TSAN WERROR ONEDNN V (and T for unit)"

# One test module alone: `make unit T=segment`. Modules of shm/ need only shm to compile.
unit: $(if $(T),$(B)/bin/test_$(T)) ## build and run one C test module: make unit T=segment
	$(if $(T),,$(error say which module: make unit T=segment))
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(B)/bin/test_$(T) $(ARGS)

# ---------------------------------------------------------------- CUDA: a plug-in, built on demand
# nvcc from the path or CUDA_HOME; cuBLASLt's header and library from CUDA_LIBS, a folder with include/
# and lib/: the Python packages of `make cuda-deps`, or a toolkit. cudart is linked statically and the
# driver found at run time, so the plug-in loads wherever libcublasLt does.
CUDA_LIBS  ?= $(or $(patsubst %/include/cublasLt.h,%,$(firstword $(wildcard \
                  $(VENV)/lib/python*/site-packages/nvidia/cu13/include/cublasLt.h \
                  $(CUDA_HOME)/include/cublasLt.h))),$(CUDA_HOME))
CUDA_ARCHS ?= -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a \
              -gencode=arch=compute_90,code=compute_90
NVFLAGS    := -std=c++20 -O3 -fmad=false --threads 2 --compress-mode=size $(CUDA_ARCHS) -I. -I$(B)/gen -I$(CUDA_LIBS)/include \
              -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas -Xptxas -v
CUDA_OBJ   := $(patsubst %.cu,$(B)/cuda/%.o,$(CUDA_SRC) $(sort $(wildcard kernels/cuda/plugin/*.cu)))
CUBLASLT    = $(or $(firstword $(wildcard $(CUDA_LIBS)/lib/libcublasLt.so.13 $(CUDA_LIBS)/lib64/libcublasLt.so.13)),\
                  $(error no libcublasLt.so.13 below $(CUDA_LIBS): make cuda-deps, or CUDA_LIBS=FOLDER))
CUDART      = $(firstword $(wildcard $(addsuffix /libcudart_static.a,$(CUDA_HOME)/lib64 $(CUDA_HOME)/lib \
                  $(CUDA_LIBS)/lib)))

cuda: $(B)/lib/libgradd_cuda.so $(BIN) ## build the CUDA plug-in (nvcc; `make cuda-deps` gets the libraries)
	@$(PY) tools/gpu/symbols.py $^

cuda-deps: ## install what the plug-in is built with: cuBLASLt, cuobjdump (large)
	@$(PY) -m pip install -q nvidia-cublas==13.1.1.3 nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-cuobjdump \
	    nvidia-cuda-nvdisasm $(if $(shell command -v $(NVCC)),,'cuda-toolkit[nvcc,crt,cccl,cudart]==13.0.3')

$(B)/cuda/%.o: %.cu $(B)/gen/cuda_list.inc
	@mkdir -p $(@D); echo "  NVCC    $<"
	$(Q)$(NVCC) $(NVFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2> $(@:.o=.ptxas) || { cat $(@:.o=.ptxas); exit 1; }

# Its gradd_* symbols are the program's, which loads it.
$(B)/lib/libgradd_cuda.so: $(CUDA_OBJ) tools/gpu/gates.py
	@$(PY) tools/gpu/gates.py $(CUDA_OBJ)
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CXX) -shared -Wl,-z,relro,-z,now -Wl,-rpath,$(abspath $(dir $(CUBLASLT))) -o $@ $(CUDA_OBJ) $(CUBLASLT) \
	    $(CUDART) -lrt -lpthread -ldl
-include $(CUDA_OBJ:.o=.d)

# What travels to a machine with a GPU: daemon, tests and probes without oneDNN (it is large), the
# plug-in, the shared libraries that such a machine may lack, pyzmq for its Python, and models.
# libcublasLt is its own.
GPU_B := $(B)/gpu
GPU_PYTHON ?= 3.12
gpu-bundle: cuda $(GPU_B)/bin/probe ## collect in build/gpu what tools/gpu/run.sh needs
	@$(MAKE) --no-print-directory ONEDNN=none B=$(GPU_B) $(addprefix $(GPU_B)/bin/,gradd tests bench_engine)
	@mkdir -p $(GPU_B)/models; for shape in 1b 8b; do \
	    [ -e $(GPU_B)/models/$$shape.onnx ] || { $(MAKE) --no-print-directory all && \
	    GRADD_BIN=$(abspath $(B)/bin/gradd) PYTHONPATH=adapters/python GRADD_SELF_CHECK=0 \
	    $(PY) tools/gpu/llama.py capture $$shape $(GPU_B)/models/$$shape.onnx; } || exit 1; done
	@$(PY) -m pip download -q --no-deps --only-binary=:all: --implementation cp -d $(GPU_B)/wheels \
	    --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 pyzmq
	@mkdir -p $(GPU_B)/lib; cp $(B)/lib/libgradd_cuda.so $(GPU_B)/lib/
	@for f in $$(ldd $(GPU_B)/bin/gradd | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | grep -vE '/(libc|libm|libdl|librt|libresolv|libpthread|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so'); do \
	    cp -L $$f $(GPU_B)/lib/; done
	@strip -g $(GPU_B)/bin/* $(GPU_B)/lib/*; rm -rf $(GPU_B)/gen $(GPU_B)/gen-obj $(GPU_B)/shm $(GPU_B)/kernels \
	    $(GPU_B)/server $(GPU_B)/tests $(GPU_B)/emu $(GPU_B)/fake $(GPU_B)/benchmarks $(GPU_B)/lib/*.a; du -sh $(GPU_B)
$(GPU_B)/bin/probe: tools/gpu/probe.cu tools/gpu/json_error.h $(wildcard kernels/math/*.h kernels/cuda/half.h)
	@mkdir -p $(@D); echo "  NVCC    $<"
	$(Q)$(NVCC) -std=c++20 -O2 $(CUDA_ARCHS) -I. -I$(CUDA_LIBS)/include $< -o $@ -ldl

# ---------------------------------------------------------------- generated sources
# Each list is rewritten only when its content changed, so adding a file rebuilds what reads the list.
GEN := $(B)/gen/op_list.inc $(B)/gen/cpu_list.inc $(B)/gen/cuda_list.inc $(B)/gen/backend_list.inc \
       $(B)/gen/fake/backend_list.inc $(B)/gen/pass_list.inc $(B)/gen/placed_list.inc \
       $(B)/gen/cmd_list.inc $(B)/gen/test_list.inc $(B)/gen/flags.txt
put_list = @mkdir -p $(@D); { $(1); } > $@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
names    = :$(foreach n,$(1),; echo 'X($(n))')
scan_tests = sed -n -e 's/^TEST(\([a-z0-9_]*\)).*/X($(2), \1, 10)/p' \
             -e 's/^TEST_LIMIT(\([a-z0-9_]*\), *\([0-9]*\)).*/X($(2), \1, \2)/p' $(1)

$(B)/gen/op_list.inc: FORCE
	$(call put_list,$(call names,$(sort $(basename $(notdir $(wildcard kernels/ops/*/*.c))))))
BACKENDS = $(patsubst kernels/%/backend.c,%,$(sort $(wildcard kernels/*/backend.c)))
$(B)/gen/backend_list.inc: FORCE
	$(call put_list,$(call names,$(BACKENDS)))
$(B)/gen/fake/backend_list.inc: FORCE
	$(call put_list,$(call names,$(BACKENDS) fake emu))
$(B)/gen/cuda_list.inc: FORCE
	$(call put_list,$(call names,$(sort $(basename $(notdir $(shell grep -l "^GRADD_KERNELS" $(CUDA_SRC)))))))
# families with rows for the CPU: those of composites alone have none
$(B)/gen/cpu_list.inc: FORCE
	$(call put_list,$(call names,$(sort $(basename $(notdir $(shell grep -l '^GRADD_KERNELS' kernels/ops/*/*.c))))))
$(B)/gen/pass_list.inc: FORCE
	$(call put_list,$(call names,$(sort $(basename $(notdir $(wildcard server/graph/passes/*.c))))))
$(B)/gen/placed_list.inc: FORCE
	$(call put_list,$(call names,$(sort $(basename $(notdir $(wildcard server/plan/passes/*.c))))))
$(B)/gen/cmd_list.inc: FORCE
	$(call put_list,$(call names,$(patsubst cmd_%.c,%,$(sort $(notdir $(wildcard server/verbs/cmd_*.c server/daemon/cmd_*.c))))))
$(B)/gen/test_list.inc: FORCE
	$(call put_list,:$(foreach f,$(TEST_SRC),; $(call scan_tests,$(f),$(call test_name,$(f)))))
$(B)/gen/unit/%/test_list.inc: FORCE
	$(call put_list,$(call scan_tests,$(wildcard tests/c/*/test_$*.c),$*))
$(B)/gen/flags.txt: FORCE
	$(call put_list,echo '$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) $(CXX) $(CXXFLAGS_ALL)')
FORCE:

$(B)/gen/%.pb-c.c $(B)/gen/%.pb-c.h: %.proto
	@mkdir -p $(B)/gen; echo "  PROTO   $<"
	$(Q)protoc-c --c_out=$(B)/gen $<

# ---------------------------------------------------------------- compile and link
$(ALL_OBJ): $(B)/gen/flags.txt | $(GEN) $(PB_C:.c=.h)

$(call obj,$(TEST_SRC)): $(B)/%.o: %.c
	@mkdir -p $(@D); echo "  CC      $<"
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -DTEST_MODULE=$(call test_name,$<) -MMD -MP -c $< -o $@
$(B)/%.o: %.c
	@mkdir -p $(@D); echo "  CC      $<"
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -MMD -MP -c $< -o $@
$(B)/emu/%.o: %.cu
	@mkdir -p $(@D); echo "  CXX     $< (emulated)"
	$(Q)$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) -MMD -MP -x c++ -c $< -o $@
$(B)/%.o: %.cc
	@mkdir -p $(@D); echo "  CXX     $<"
	$(Q)$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) -MMD -MP -c $< -o $@
$(B)/fake/devices.o: kernels/contract/devices.c
	@mkdir -p $(@D); echo "  CC      $< (with tests/fake)"
	$(Q)$(CC) -I$(B)/gen/fake $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -MMD -MP -c $< -o $@
$(B)/gen-obj/%.o: $(B)/gen/%.c
	@mkdir -p $(@D); echo "  CC      $<"
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) -MMD -MP -c $< -o $@

archive = @mkdir -p $(@D); echo "  AR      $@"; rm -f $@; $(AR) rcs $@ $(filter %.o,$^)
# Shared objects export gradd_* and nothing else. A sanitizer's runtime stays undefined in them.
share   = @mkdir -p $(@D); echo "  LD      $@"; $(CC) -shared $(LDFLAGS_ALL) \
          $(if $(SANITIZE),,-Wl$(comma)-z$(comma)defs) \
          -Wl,-soname,$(@F) -Wl,--version-script=tools/exports.map -o $@ $(filter %.o,$^) $(1)
link    = @mkdir -p $(@D); echo "  LD      $@"; $(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) \
          $(filter %.a,$^) $(1)

# The list of members is part of each archive's recipe input: a deleted source must leave it.
$(B)/lib/libgradd_shm.a: $(SHM_OBJ) $(B)/gen/shm_members.txt
	$(archive)
$(B)/lib/libgradd.a: $(ENGINE_OBJ) $(B)/gen/engine_members.txt
	$(archive)
$(B)/gen/shm_members.txt: FORCE
	$(call put_list,echo '$(SHM_OBJ)')
$(B)/gen/engine_members.txt: FORCE
	$(call put_list,echo '$(ENGINE_OBJ)')
$(B)/lib/libgradd_shm.so: $(SHM_OBJ) $(B)/gen/shm_members.txt tools/exports.map
	$(call share,-lpthread)
$(B)/lib/libgradd.so: $(ENGINE_OBJ) $(B)/gen/engine_members.txt tools/exports.map
	$(call share,$(ENGINE_LIBS))
$(B)/bin/gradd: $(DAEMON_OBJ) $(ENGINE_OBJ)
	$(call link,$(PLUGIN_HOST) $(DAEMON_LIBS))

$(FAKE): $(DAEMON_OBJ) $(FAKE_OBJ) $(B)/lib/libgradd.a
	$(call link,$(PLUGIN_HOST) $(DAEMON_LIBS))

$(B)/tests/runner.o: $(B)/gen/test_list.inc $(B)/gen/flags.txt
$(B)/bin/tests: $(B)/tests/runner.o $(TEST_OBJ) $(FAKE_OBJ) $(TESTED_DAEMON_OBJ) $(B)/lib/libgradd.a
	$(call link,$(PLUGIN_HOST) $(DAEMON_LIBS))

# A unit runner has its own list and links what its module needs: shm alone, the engine, or the
# daemon's modules too when the test includes one of their headers. So work in progress elsewhere
# does not stop it.
$(B)/unit/%/runner.o: tests/runner.c $(B)/gen/unit/%/test_list.inc $(B)/gen/flags.txt tests/test.h
	@mkdir -p $(@D)
	$(Q)$(CC) -I$(B)/gen/unit/$* $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -c $< -o $@
.SECONDEXPANSION: # a runner finds the object of its test by name
UNIT_ALL := $(addprefix $(B)/bin/,$(basename $(notdir $(TEST_SRC))))
UNIT_SHM := $(filter $(patsubst shm/%.c,$(B)/bin/test_%,$(SHM_SRC)),$(UNIT_ALL))
$(UNIT_SHM): $(B)/bin/test_%: $(B)/unit/%/runner.o $$(call test_obj,$$*) $(call obj,tests/c/descriptors.c) $(B)/lib/libgradd_shm.a
	$(call link,-lpthread -lm)
DAEMON_H := ^.include "(server/(host|session|daemon|verbs|wire|explain|cli)/[a-z_]+|tests/c/peer)\.h"
UNIT_DAEMON := $(filter-out $(UNIT_SHM),$(addprefix $(B)/bin/,$(basename $(notdir \
    $(if $(TEST_SRC),$(shell grep -lE '$(DAEMON_H)' $(TEST_SRC)))))))
$(filter-out $(UNIT_SHM),$(UNIT_ALL)): $(B)/bin/test_%: $(B)/unit/%/runner.o \
    $$(call test_obj,$$*) $(B)/tests/libhelp.a $(FAKE_OBJ) $(B)/lib/libgradd.a
	$(call link,$(DAEMON_LIBS))
$(B)/tests/libhelp.a: $(call obj,$(TEST_HELP_SRC))
	$(archive)
$(UNIT_DAEMON): $(TESTED_DAEMON_OBJ) $(call obj,$(PEER_SRC))

# Fuzz targets with the driver of our own; in the fuzz build clang brings libFuzzer's instead.
FUZZ_DRIVER := $(if $(findstring fuzzer,$(CFLAGS)),,tests/fuzz/standalone.c)
FUZZ_BINS   := $(FUZZ_TARGETS:%=$(B)/bin/fuzz_%)
$(FUZZ_BINS): $(B)/bin/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(call obj,$(FUZZ_HELP) $(FUZZ_DRIVER)) \
    $(TESTED_DAEMON_OBJ) $(B)/lib/libgradd.a
	$(call link,$(DAEMON_LIBS))
fuzz-bins: $(FUZZ_BINS)
fuzz-quick: fuzz-bins ## a few seconds of blind mutations with the ordinary build
	@for t in $(FUZZ_TARGETS); do printf '%s: ' fuzz_$$t; \
	    GRADD_LOG=error OMP_NUM_THREADS=1 $(B)/bin/fuzz_$$t -runs=20000 || exit 1; done

# What a request costs, without Python: build/bin/bench_ipc starts the daemon next to it.
$(B)/bin/bench_ipc: $(B)/benchmarks/bench_ipc.o $(call obj,$(PEER_SRC) $(TEST_HELP_SRC)) \
    $(TESTED_DAEMON_OBJ) $(B)/lib/libgradd.a | $(B)/bin/gradd
	$(call link,$(DAEMON_LIBS))
# Where a step's time goes, operator by operator: build/bin/bench_engine model.onnx input=2x3 ...
$(B)/bin/bench_engine: $(B)/benchmarks/bench_engine.o $(ENGINE_OBJ)
	$(call link,$(PLUGIN_HOST) $(ENGINE_LIBS))
.SECONDARY:

-include $(ALL_OBJ:.o=.d) $(B)/tests/runner.d
