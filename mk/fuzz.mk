# Mutated input: libFuzzer with clang, blind mutations without it.

# Fuzzing. With clang the whole engine is built once more with coverage and sanitizers (one thread:
# platform/serial/omp.h) and libFuzzer runs each target. Without it gcc's sanitizers and a driver
# that mutates blindly (tests/fuzz/standalone.c) stand in. clang's pointer-overflow is off: it
# objects to NULL plus an offset, which kernels form, and never use, for tensors and scratch without
# bytes.
# Findings and corpora stay in $(B)/fuzz.
FUZZ_RUNS    ?= 100000
FUZZ_CC      ?= clang
FUZZ_TARGETS ?= wire handle import control state checkpoint artifacts lasting \
                manifest
FUZZ_MAX     := -max_len=16384 -timeout=20 -rss_limit_mb=2048
FUZZ_HELP    := $(filter-out tests/fuzz/fuzz_%.c tests/fuzz/standalone.c,\
                    $(wildcard tests/fuzz/*.c)) tests/c/onnx_build.c
FUZZ_O       := $(B)/fuzz/obj
# clang may be there without its runtime, which Debian has in libclang-rt-NN-dev.
HAVE_FUZZER  := $(wildcard $(shell $(FUZZ_CC) -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer*)
FUZZ_MAKE     = $(MAKE) --no-print-directory B=$(FUZZ_O) ASAN=1 UBSAN=1
ifneq ($(HAVE_FUZZER),)
FUZZ_CFLAGS  := -fsanitize=fuzzer-no-link -fno-openmp -isystem platform/serial -w \
                -fno-sanitize=pointer-overflow
FUZZ_MAKE    += CC=$(FUZZ_CC) CFLAGS='$(FUZZ_CFLAGS)' \
                LDFLAGS='-fsanitize=fuzzer -fno-openmp'
FUZZ_RUN      = -runs=$(FUZZ_RUNS) $(FUZZ_MAX) -print_final_stats=1 ../corpus_$(1)
else
FUZZ_RUN      = -runs=$(FUZZ_RUNS)
endif
fuzz: ## mutated input for all FUZZ_TARGETS or FUZZ_TARGETS="wire ...", FUZZ_RUNS=100000 each
	$(if $(HAVE_FUZZER),,@echo "*** no libFuzzer: NO COVERAGE, the mutations are blind ***")
	@$(FUZZ_MAKE) $(FUZZ_TARGETS:%=$(FUZZ_O)/bin/fuzz_%)
	@for t in $(FUZZ_TARGETS); do $(MAKE) --no-print-directory fuzz-run-$$t || exit 1; done
fuzz-run-%:
	@mkdir -p $(B)/fuzz/$* $(B)/fuzz/corpus_$*; echo "  FUZZ    fuzz_$*, $(FUZZ_RUNS) executions"
	@GRADD_FUZZ_SEEDS=$(B)/fuzz/corpus_$* $(FUZZ_O)/bin/fuzz_$*
	@cd $(B)/fuzz/$* && OMP_NUM_THREADS=1 GRADD_LOG=error ASAN_OPTIONS=quarantine_size_mb=32 \
	    ../obj/bin/fuzz_$* $(call FUZZ_RUN,$*)

# Fuzz targets with the driver of our own; in the fuzz build clang brings libFuzzer's instead.
FUZZ_DRIVER := $(if $(findstring fuzzer,$(CFLAGS)),,tests/fuzz/standalone.c)
FUZZ_BINS   := $(FUZZ_TARGETS:%=$(B)/bin/fuzz_%)
$(FUZZ_BINS): $(B)/bin/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(call obj,$(FUZZ_HELP) $(FUZZ_DRIVER)) \
    $(TRAIN_OBJ) $(TESTED_DAEMON_OBJ) $(B)/lib/libgradd.a
	$(call link,$(DAEMON_LIBS))
fuzz-bins: $(FUZZ_BINS)
fuzz-quick: fuzz-bins ## a few seconds of blind mutations with the ordinary build
	@for t in $(FUZZ_TARGETS); do printf '%s: ' fuzz_$$t; \
	    GRADD_LOG=error OMP_NUM_THREADS=1 $(B)/bin/fuzz_$$t -runs=20000 || exit 1; done
