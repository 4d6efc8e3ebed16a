# gradd: one makefile in parts (mk/*.mk), not recursive. Build results land in $(B);
# nothing generated is committed. `make help` lists the targets; variables below can be set on the
# command line.

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

# ---------------------------------------------------------------- setup (by itself when missing)
# $(SETUP) is an included makefile: when it is missing or older than the lists of packages, make
# runs its rule first and starts over, so that all below sees the finished installation.
SETUP := $(VENV)/gradd-setup.mk
NO_SETUP_GOALS := clean help setup
ifneq ($(filter-out $(NO_SETUP_GOALS),$(or $(MAKECMDGOALS),all)),)
include $(SETUP)
endif
$(SETUP): tools/setup.sh constraints.txt requirements.txt requirements-dev.txt
	@sh tools/setup.sh $(VENV)

include mk/libs.mk

# ---------------------------------------------------------------- sources: found, never listed
SHM_SRC    := $(sort $(wildcard shm/*.c))
PLATFORM_SRC := platform/posix.c platform/files.c platform/disk.c
KERNEL_SRC := $(sort $(wildcard kernels/*.c kernels/*/*.c kernels/*/*/*.c))
ENGINE_SRC := $(sort $(wildcard server/graph/*.c server/graph/*/*.c server/plan/*.c \
                                server/plan/passes/*.c server/device/*.c server/exec/*.c))
DAEMON_SRC := $(sort $(wildcard server/host/*.c server/wire/*.c server/session/*.c \
                                server/explain/*.c server/verbs/*.c server/daemon/*.c \
                                server/owner/*.c server/users/*.c server/web/*.c \
                                server/cli/*.c))
TRAIN_SRC  := $(sort $(wildcard train/*.c train/files/*.c))
# Of these, what stands beside a library that is there in tests: plug-ins, protobuf-c.
TRAIN_OWN  := train/no_plugins.c train/onnx_unpack.c
TEST_SRC   := $(sort $(wildcard tests/c/*/test_*.c))
# Names of test modules are unique whatever their room, so an object or a runner is found by name.
test_name   = $(patsubst test_%.c,%,$(notdir $(1)))
test_obj    = $(call obj,$(filter %/test_$(1).c,$(TEST_SRC)))
PEER_SRC   := tests/c/peer.c
FAKE_SRC   := $(sort $(wildcard tests/fake/*.c tests/sim/*.c))
# GPU kernels with their device, and the emulation of both on the host (tests/emu, tests/sim).
CUDA_SRC   := $(sort $(wildcard kernels/cuda/*.cu kernels/cuda/*/*.cu))
EMU_TORCH  := $(if $(shell command -v $(CXX)),$(B)/lib/emu_torch.so)
EMU_SRC    := $(sort $(wildcard tests/emu/*.cc))
SIM_NCCL   := $(B)/lib/libnccl_sim.so
TEST_HELP_SRC := $(sort $(filter-out $(TEST_SRC) $(PEER_SRC),$(wildcard tests/c/*.c)))
PROTO      := $(wildcard server/graph/onnx.proto)
PB_C       := $(PROTO:%.proto=$(B)/gen/%.pb-c.c)

obj = $(patsubst %.c,$(B)/%.o,$(1))
PB_OBJ     := $(PB_C:$(B)/gen/%.c=$(B)/gen-obj/%.o)
SHM_OBJ    := $(call obj,$(SHM_SRC))
ENGINE_OBJ := $(SHM_OBJ) $(call obj,$(PLATFORM_SRC) $(KERNEL_SRC) $(ENGINE_SRC)) $(PB_OBJ)
DAEMON_OBJ := $(call obj,$(DAEMON_SRC))
TRAIN_OBJ  := $(call obj,$(filter-out $(TRAIN_OWN),$(TRAIN_SRC)))
# The devices of the tests, and the list of devices with them in place of the library's own.
EMU_OBJ    := $(CUDA_SRC:%.cu=$(B)/emu/%.o) $(EMU_SRC:%.cc=$(B)/%.o)
DEVICES    := $(B)/fake/kernels/contract/devices.o
FAKE_OBJ   := $(call obj,$(FAKE_SRC)) $(EMU_OBJ) $(DEVICES)
TEST_HELP_SRC += $(filter-out $(TRAIN_OWN),$(TRAIN_SRC))
TEST_OBJ   := $(call obj,$(TEST_SRC) $(TEST_HELP_SRC) $(PEER_SRC))
FUZZ_ALL_OBJ := $(call obj,$(wildcard tests/fuzz/*.c) tests/c/onnx_build.c)
ALL_OBJ    := $(ENGINE_OBJ) $(DAEMON_OBJ) $(TEST_OBJ) $(FAKE_OBJ) $(FUZZ_ALL_OBJ) \
              $(call obj,$(wildcard tests/sim/nccl/*.c)) \
              $(B)/benchmarks/bench_ipc.o $(B)/benchmarks/bench_engine.o
# The runner holds the daemon's modules too, except the one with main().
TESTED_DAEMON_OBJ := $(filter-out $(B)/server/cli/main.o,$(DAEMON_OBJ))

LIBS := $(B)/lib/libgradd_shm.a $(B)/lib/libgradd_shm.so $(B)/lib/libgradd.a $(B)/lib/libgradd.so \
        $(B)/lib/libgradd_train.so
BIN  := $(B)/bin/gradd
FAKE := $(B)/bin/gradd-fake

# ---------------------------------------------------------------- targets
.PHONY: all versions cuda cuda-deps gpu-bundle setup test nightly torture check check-asan \
        check-tsan check-emu train-test demo bench families fuzz fuzz-quick fuzz-bins format lint \
        pages site docs clean help unit info wheel FORCE

all: $(LIBS) $(BIN) ## build libraries and daemon (sets up first when needed)

setup: ## install what is missing: system packages, .venv, Python packages (repeatable)
	@sh tools/setup.sh $(VENV)

demo: all ## train a small Llama through the daemon, next to plain Trainer
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) -m optimum.gradd.demo $(ARGS)

bench: all ## measure against torch eager and torch.compile
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) benchmarks/run.py $(ARGS)

C_FILES = $(shell find shm platform kernels server train tests benchmarks \
                       \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null | sort) \
          $(wildcard tools/*.c)
format: ## rewrite all sources in the house format
	$(Q)$(VENV)/bin/clang-format -i $(C_FILES)
	$(Q)$(VENV)/bin/ruff format -q . && $(VENV)/bin/ruff check -q --fix .

BESIDE  := xargs -P $(shell nproc) # each line, or so many lines, a process
lint: ## formatting and static checks, changes nothing
	$(Q)printf '%s\n' $(C_FILES) | $(BESIDE) -n 64 $(VENV)/bin/clang-format --dry-run -Werror
	$(Q)$(VENV)/bin/ruff format -q --check . && $(VENV)/bin/ruff check -q .
	$(Q)printf '%s\n' tests/check_*.py | $(BESIDE) -n 1 $(PY)

pages: $(BIN) ## rewrite the pages that are made from lists: operators, options, messages, ...
	@$(PY) tools/docs.py $(BIN)

SITE := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
site: ## build the site of the documentation into $(B)/site; a warning is an error
	@$(SITE) build --strict -d $(abspath $(B)/site)
docs: ## show the site at http://127.0.0.1:8000, rebuilt when a page changes
	@$(SITE) serve

FAMILIES := benchmarks/results/families.jsonl
# What this has a row of is not run again: remove rows to try their classes once more.
families: all ## try every family of transformers (four hours), write docs/families.md
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tools/families.py $(FAMILIES)
	@$(PY) tools/families.py $(FAMILIES) --page docs/families.md

clean: ## remove build output (keeps .venv)
	rm -rf $(B)

info: ## what the build found
	@echo "compiler  $(CC) $$($(CC) -dumpfullversion), $(MACHINE), $(OPTIMISE) $(ARCH) $(SANITIZE)"
	@echo "oneDNN    $(or $(DNNL_FOUND),not found: own blocked product)"
	@echo "msgpack   $(or $(MSGPACK_PC),not found by pkg-config)"
	@echo "CUDA      $(if $(wildcard $(CUDA_HOME)/include/cuda.h),headers in $(CUDA_HOME),no headers\
	    in $(CUDA_HOME): CPU only)"

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile mk/*.mk | \
	 while IFS='|' read -r t d; do printf '%-14s %s\n' "$$t" "$$d"; done
	@echo "  variables: B CC NVCC CUDA_HOME ARCH DEBUG ASAN UBSAN TSAN WERROR ONEDNN V; T for unit"

include mk/tests.mk mk/fuzz.mk mk/cuda.mk mk/wheel.mk mk/gen.mk mk/train.mk mk/languages.mk \
        mk/web.mk

# ---------------------------------------------------------------- compile and link
$(ALL_OBJ): $(B)/gen/flags.txt | $(GEN) $(PB_C:.c=.h)

$(call obj,$(TEST_SRC)): $(B)/%.o: %.c
	@mkdir -p $(@D); echo "  CC      $<"
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -DTEST_MODULE=$(call test_name,$<) \
	    -MMD -MP -c $< -o $@
$(B)/%.o: %.c
	@mkdir -p $(@D); echo "  CC      $<"
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -MMD -MP -c $< -o $@
$(B)/emu/%.o: %.cu
	@mkdir -p $(@D); echo "  CXX     $< (emulated)"
	$(Q)$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) -MMD -MP -x c++ -c $< -o $@
$(B)/%.o: %.cc
	@mkdir -p $(@D); echo "  CXX     $<"
	$(Q)$(CXX) $(CPPFLAGS_ALL) $(CXXFLAGS_ALL) -MMD -MP -c $< -o $@
$(DEVICES): kernels/contract/devices.c
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
# train/ over this engine and its libraries, for Python's tests; mk/train.mk makes that of a device.
$(B)/lib/libgradd_train.so: $(ENGINE_OBJ) $(TRAIN_OBJ) tools/exports.map
	$(call share,$(ENGINE_LIBS))
$(B)/bin/gradd: $(DAEMON_OBJ) $(ENGINE_OBJ)
	$(call link,$(PLUGIN_HOST) $(DAEMON_LIBS))

# The cost of a request, without Python: build/bin/bench_ipc starts the daemon next to it.
$(B)/bin/bench_ipc: $(B)/benchmarks/bench_ipc.o $(call obj,$(PEER_SRC) $(TEST_HELP_SRC)) \
    $(TESTED_DAEMON_OBJ) $(B)/lib/libgradd.a | $(B)/bin/gradd
	$(call link,$(DAEMON_LIBS))
# The time of a step, operator by operator: build/bin/bench_engine model.onnx input=2x3 ...
$(B)/bin/bench_engine: $(B)/benchmarks/bench_engine.o $(ENGINE_OBJ)
	$(call link,$(PLUGIN_HOST) $(ENGINE_LIBS))
$(B)/bin/bench_engine-fake: $(B)/benchmarks/bench_engine.o $(FAKE_OBJ) $(B)/lib/libgradd.a
	$(call link,$(PLUGIN_HOST) $(ENGINE_LIBS))
.SECONDARY:

-include $(ALL_OBJ:.o=.d) $(B)/tests/runner.d
