# Running the tests, with and without sanitizers, and linking them.

SCARCE := $(B)/lib/scarce.so
TESTED := $(B)/bin/tests $(FAKE) $(EMU_TORCH) $(SCARCE) $(B)/bin/bench_engine-fake
TRAINS := $(addprefix $(B)/train/native/,device_program $(if $(EMU_TORCH),device_program_cpp) \
          case_bits case_bits_short) $(B)/bin/case_bits
test: all $(TESTED) $(TRAINS) fuzz-bins ## every test: checks, C, mutated input, Python
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tests/run_all.py --build $(B)

nightly: all $(TESTED) $(TRAINS) ## long property tests, a parity per switch (ONLY="..."), hours
	@GRADD_BIN=$(abspath $(B)/bin/gradd) nice $(PY) tests/run_all.py --build $(B) \
	    --nightly benchmarks/results/nightly.txt $(if $(ONLY),--only $(ONLY))

# Cross compilers with their emulator, emscripten, node, a browser, compilers of other languages
# (but cargo, which Debian has too old): root installs what is missing, else tests that need it say
# so and are skipped.
TRAIN_NEEDS := emscripten nodejs chromium qemu-user gcc-aarch64-linux-gnu gcc-arm-linux-gnueabihf \
               gcc-riscv64-linux-gnu clang default-jdk-headless mono-mcs mono-runtime \
               libmono-system-core4.0-cil
train-test: $(B)/flower/bin/python
train-test: all $(TRAINS) ## training on devices: all tests, other machines and a browser too
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    ! dpkg -s $(TRAIN_NEEDS) >/dev/null 2>&1; then \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	        $(TRAIN_NEEDS); fi
	@GRADD_BIN=$(abspath $(B)/bin/gradd) GRADD_BUILD=$(abspath $(B)) nice \
	    $(PY) -m pytest -q -m "" tests/python/ondevice

# Flower has many dependencies: an environment of its own.
$(B)/flower/bin/python:
	@$(PY) -m venv $(B)/flower && $(B)/flower/bin/pip install -q flwr numpy

# The counts go on from run to run in benchmarks/results/torture.json.
TORTURE_SECONDS ?= 600
torture: all $(B)/bin/test_restart_points ## kill -9 during training, for TORTURE_SECONDS=600
	@GRADD_EVERY_POINT=1 GRADD_BIN=$(abspath $(B)/bin/gradd) $(B)/bin/test_restart_points
	@GRADD_BIN=$(abspath $(B)/bin/gradd) PYTHONPATH=adapters/python nice $(PY) \
	    benchmarks/torture.py --seconds $(TORTURE_SECONDS)

check: lint all $(TESTED) ## the inner loop: lint, checks, C, quick Python
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(PY) tests/run_all.py --build $(B) --quick

versions: all ## quick tests under other torch and Python (ONLY="2.14-3.13"), some GB each
	@$(PY) tools/versions.py --build $(B) $(if $(ONLY),--only $(ONLY))

# Leaks count as well: a daemon that leaks ends with a status that its test refuses. Time limits and
# budgets are stretched; only Python tests that talk to a daemon run, for a library of this kind
# cannot be loaded into Python.
ASAN_OPT := detect_stack_use_after_return=1:allocator_may_return_null=1:detect_leaks=1
ASAN_ENV := ASAN_OPTIONS=$(ASAN_OPT) \
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
	@for t in $(EMU_TESTS); do echo "  RUN     $$t"; \
	    $(EMU_ENV) $(B)/asan/bin/$$t --limit-scale 20 || exit 1; done
	@$(PY) tests/emu/mutants.py

# gcc's OpenMP runtime is not instrumented and would be reported for every parallel loop, so only
# the modules with threads of their own run here.
TSAN_MODULES := status. handle. lease. queue. session. spans.
check-tsan: ## C tests of modules with threads of their own under ThreadSanitizer
	@$(MAKE) --no-print-directory TSAN=1 B=$(B)/tsan $(B)/tsan/bin/tests
	@TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 OMP_NUM_THREADS=1 \
	    $(B)/tsan/bin/tests --limit-scale 10 $(TSAN_MODULES:%=--filter %)

# What fails a daemon's n-th allocation.
$(SCARCE): tests/scarce/scarce.c
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CC) -std=gnu11 -O2 -fPIC -shared $(WARN) -fno-builtin -o $@ $<

# One test module alone: `make unit T=segment`. Modules of shm/ need only shm to compile.
unit: $(if $(T),$(B)/bin/test_$(T)) ## build and run one C test module: make unit T=segment
	$(if $(T),,$(error say which module: make unit T=segment))
	@GRADD_BIN=$(abspath $(B)/bin/gradd) $(B)/bin/test_$(T) $(ARGS)

$(FAKE): $(DAEMON_OBJ) $(FAKE_OBJ) $(B)/lib/libgradd.a | $(SIM_NCCL)
	$(call link,$(PLUGIN_HOST) $(SIM_HOST) $(DAEMON_LIBS))

# A stand-in for NCCL, which these programs open as the plug-in opens NCCL.
$(call obj,$(wildcard tests/sim/nccl/*.c)): CPPFLAGS_ALL += -Itests/sim
$(SIM_NCCL): $(call obj,$(wildcard tests/sim/nccl/*.c))
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CC) $(LDFLAGS_ALL) -shared -o $@ $^ -lrt

# Devices of tests/sim for torch (tests/sim/torch), and the version of torch they are built for.
$(B)/lib/libsim.so: $(call obj,$(wildcard tests/sim/*.c))
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CC) $(LDFLAGS_ALL) -shared -o $@ $^ -lpthread
$(EMU_TORCH): tests/sim/torch/device.cc tests/sim/sim.h tests/sim/cuda.h tests/sim/cuda_runtime.h \
    $(B)/lib/libsim.so
	@echo "  CXX     $<"; torch=$$($(PY) -c 'import torch; print(*torch.__path__)') && \
	    $(CXX) -std=c++20 -O0 -fPIC -shared -Wall -I. -isystem $$torch/include \
	    -isystem $$torch/include/torch/csrc/api/include -o $@ $< -L$$torch/lib -ltorch_cpu -lc10 \
	    -L$(@D) -lsim -Wl,-rpath,'$$ORIGIN' && \
	    $(PY) -c 'import torch; print(torch.__version__)' > $(@:.so=.txt)

$(B)/tests/runner.o: $(B)/gen/test_list.inc $(B)/gen/flags.txt
$(B)/bin/tests: $(B)/tests/runner.o $(TEST_OBJ) $(FAKE_OBJ) $(TESTED_DAEMON_OBJ) \
    $(B)/lib/libgradd.a | $(SIM_NCCL)
	$(call link,$(PLUGIN_HOST) $(SIM_HOST) $(DAEMON_LIBS))

# A unit runner has its own list and links what its module needs: shm alone, the engine, or the
# daemon's modules too when the test includes one of their headers. So work in progress elsewhere
# does not stop it.
$(B)/unit/%/runner.o: tests/runner.c $(B)/gen/unit/%/test_list.inc $(B)/gen/flags.txt tests/test.h
	@mkdir -p $(@D)
	$(Q)$(CC) -I$(B)/gen/unit/$* $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -c $< -o $@
.SECONDEXPANSION: # a runner finds the object of its test by name
UNIT_ALL := $(addprefix $(B)/bin/,$(basename $(notdir $(TEST_SRC))))
UNIT_SHM := $(filter $(patsubst shm/%.c,$(B)/bin/test_%,$(SHM_SRC)),$(UNIT_ALL))
$(UNIT_SHM): $(B)/bin/test_%: $(B)/unit/%/runner.o $$(call test_obj,$$*) \
    $(call obj,tests/c/descriptors.c) $(B)/lib/libgradd_shm.a
	$(call link,-lpthread -lm)
DAEMON_IN := host|session|daemon|verbs|wire|explain|cli
DAEMON_H := ^.include "(server/($(DAEMON_IN))/[a-z_]+|tests/c/peer)\.h"
UNIT_DAEMON := $(filter-out $(UNIT_SHM),$(addprefix $(B)/bin/,$(basename $(notdir \
    $(if $(TEST_SRC),$(shell grep -lE '$(DAEMON_H)' $(TEST_SRC)))))))
$(filter-out $(UNIT_SHM),$(UNIT_ALL)): $(B)/bin/test_%: $(B)/unit/%/runner.o \
    $$(call test_obj,$$*) $(B)/tests/libhelp.a $(FAKE_OBJ) $(B)/lib/libgradd.a | $(SIM_NCCL)
	$(call link,$(SIM_HOST) $(DAEMON_LIBS))
$(B)/tests/libhelp.a: $(call obj,$(TEST_HELP_SRC))
	$(archive)
$(UNIT_DAEMON): $(TESTED_DAEMON_OBJ) $(call obj,$(PEER_SRC))
