# libgradd_train: the engine and train/ for a device, small and without libraries. TARGET says for
# which: native, aarch64, armhf, riscv64, wasm or android, each in a folder of its own,
# $(B)/train/$(TARGET). Their compilers are packages of Debian: gcc-aarch64-linux-gnu and its like,
# gcc-mingw-w64-x86-64-posix, emscripten; programs for them run in qemu-user, wine and node. For
# android NDK names Android's kit.
TARGET ?= native
T_B    := $(B)/train/$(TARGET)

T_PREFIX_aarch64 := aarch64-linux-gnu-
T_PREFIX_armhf   := arm-linux-gnueabihf-
T_PREFIX_riscv64 := riscv64-linux-gnu-
T_PREFIX_windows := x86_64-w64-mingw32-
T_PREFIX := $(T_PREFIX_$(TARGET))
NDK_BIN  := $(NDK)/toolchains/llvm/prebuilt/linux-x86_64/bin
T_CC_wasm       := emcc
T_AR_wasm       := emar
T_CC_android    := $(NDK_BIN)/aarch64-linux-android26-clang
T_AR_android    := $(NDK_BIN)/llvm-ar
T_STRIP_android := $(NDK_BIN)/llvm-strip
T_CC     := $(or $(T_CC_$(TARGET)),$(if $(T_PREFIX),$(T_PREFIX)gcc,$(CC)))
T_AR     := $(or $(T_AR_$(TARGET)),$(T_PREFIX)ar)
T_STRIP  := $(or $(T_STRIP_$(TARGET)),$(T_PREFIX)strip)

# 32 registers of 128 bits, but for armhf, which has 16.
T_ARCH_native  := $(ARCH)
T_ARCH_armhf   := -march=armv7-a+neon-vfpv4 -mfloat-abi=hard
T_ARCH_wasm    := -msimd128
# Windows aligns stacks to 16 bytes: vectors there are moved as unaligned ones.
T_ARCH_windows := $(ARCH) -Wa,-muse-unaligned-vector-move
# One thread where the compiler has no OpenMP: platform/serial/omp.h stands in.
T_OMP_wasm    := -Iplatform/serial -Wno-unknown-pragmas
T_OMP_android := $(T_OMP_wasm) # the kit's OpenMP: T_OMP="-fopenmp -static-openmp"
T_OMP      := $(or $(T_OMP_$(TARGET)),-fopenmp)
# clang knows not all of gcc's; what only `#pragma omp` reads is unused without it.
T_WARN_wasm := $(filter-out %maybe-uninitialized,$(WARN)) -Wno-unused-variable \
               -Wno-unused-function -Wno-unused-parameter
T_WARN_android := $(T_WARN_wasm)
T_WARN_windows := $(WARN) -Wno-format # it takes %zu for unknown
T_WARN         := $(or $(T_WARN_$(TARGET)),$(WARN))

# Of the engine all but what only a daemon or its tests need: segments, leases, plug-ins, oneDNN,
# the journal of a step. protobuf-c's runtime is replaced by train/onnx_unpack.c.
T_LEFT_OUT := kernels/contract/plugin.c kernels/cpu/onednn.c kernels/cases/% server/exec/step%.c
T_PLATFORM := $(or $(filter wasm windows,$(TARGET)),posix)
T_SRC := shm/status.c shm/dtype.c shm/tensor.c platform/$(T_PLATFORM).c \
         $(if $(filter windows,$(TARGET)),,platform/files.c platform/disk.c) \
         $(filter-out $(T_LEFT_OUT),$(KERNEL_SRC) $(ENGINE_SRC)) $(TRAIN_SRC)
T_OBJ := $(T_SRC:%.c=$(T_B)/%.o) $(PB_C:$(B)/gen/%.c=$(T_B)/gen/%.o)
T_CPPFLAGS = $(T_TYPES) -D_GNU_SOURCE -DGRADD_NO_ONEDNN -DGRADD_NO_CASES -DGRADD_NO_WIDE -I. \
             -I$(B)/gen -I$(T_B)/include $(CPPFLAGS)
T_CFLAGS   = -std=gnu11 -Os $(T_ARCH_$(TARGET)) $(T_OMP) -fPIC -ffp-contract=off -fno-math-errno \
             -fno-trapping-math -ffunction-sections -fdata-sections \
             -fno-unwind-tables -fno-asynchronous-unwind-tables $(CFLAGS)

# TYPES=f32, or TYPES=f32,f64: without the other floats; integers and booleans are always there.
T_TYPES := $(if $(OPS),,$(if $(TYPES),$(if $(findstring f64,$(TYPES)),,-DGRADD_NO_F64) \
           $(if $(findstring f16,$(TYPES)),,-DGRADD_NO_HALVES)))

T_SHARED_windows := gradd_train.dll
T_SHARED := $(if $(filter wasm,$(TARGET)),,$(or $(T_SHARED_$(TARGET)),libgradd_train.so))
T_LIBS := $(T_B)/libgradd_train.a $(T_SHARED:%=$(T_B)/%)
.PHONY: train
train: $(T_LIBS) ## the library for training on devices: make train TARGET=aarch64

# protobuf-c's header alone, not the other headers of this machine.
$(T_B)/include/protobuf-c:
	@mkdir -p $(@D); at=$$(printf '\043include <protobuf-c/protobuf-c.h>\n' | \
	    $(CC) $(PROTO_CFLAGS) -E -x c - | sed -n 's/^# 1 "\(.*\)\/protobuf-c.h".*/\1/p') && \
	    ln -sfn $$(echo "$$at" | head -n 1) $@
$(T_B)/flags.txt: FORCE
	$(call put_list,echo '$(T_CC) $(T_CPPFLAGS) $(T_CFLAGS) $(T_WARN)')
$(T_OBJ): $(T_B)/flags.txt | $(GEN) $(PB_C:.c=.h) $(T_B)/include/protobuf-c
$(T_B)/%.o: %.c
	@mkdir -p $(@D); echo "  CC      $< ($(TARGET))"
	$(Q)$(T_CC) $(T_CPPFLAGS) $(T_CFLAGS) $(T_WARN) -MMD -MP -c $< -o $@
$(T_B)/gen/%.o: $(B)/gen/%.c
	@mkdir -p $(@D); echo "  CC      $< ($(TARGET))"
	$(Q)$(T_CC) $(T_CPPFLAGS) $(T_CFLAGS) -MMD -MP -c $< -o $@
$(T_B)/members.txt: FORCE
	$(call put_list,echo '$(T_OBJ)')
$(T_B)/libgradd_train.a: $(T_OBJ) $(T_B)/members.txt
	@echo "  AR      $@"; rm -f $@; $(T_AR) rcs $@ $(filter %.o,$^)
T_LINK  = -Wl,-z,defs -Wl,-z,relro,-z,now -Wl,-z,noseparate-code \
    -Wl,--version-script=tools/train.map -Wl,-soname,$(@F)
T_LINK_windows := -static
# The names of tools/train.map, as a regular expression: a DLL lists those that it shows.
t_shown = $$(tr -d " \n" < tools/train.map | \
    sed "s/.*global:\(.*\);local.*/\1/; s/;/|/g; s/[*]/.*/g")
$(T_B)/%.def: $(T_B)/%.a tools/train.map
	$(Q)echo EXPORTS > $@; $(T_PREFIX)nm -g --defined-only $< | sed "s/.* //" | \
	    grep -xE "$(t_shown)" | sort -u >> $@
t_share = @echo "  LD      $@"; \
    $(T_CC) -shared -Os $(T_OMP) $(LDFLAGS) $(or $(T_LINK_$(TARGET)),$(T_LINK)) \
    -Wl,--gc-sections -o $@ $(filter %.o %.def,$^) -lm && $(T_STRIP) $@
$(T_B)/gradd_train.dll: $(T_B)/libgradd_train.def
$(T_B)/ops/gradd_train.dll: $(T_B)/ops/libgradd_train.def

# OPS=model.onnx,...: in $(T_B)/ops a library with those families of operators, passes and element
# types alone that training these models needs, by the plans of a native library that has all. With
# TYPES also those types.
T_OPS     := $(subst $(comma), ,$(OPS))
T_OPS_OBJ := $(T_SRC:%.c=$(T_B)/ops/%.o) $(filter $(T_B)/gen/%,$(T_OBJ))
T_OPS_GEN := $(patsubst %,$(T_B)/ops/gen/%,op_list.inc cpu_list.inc pass_list.inc types.h)
ifneq ($(T_OPS),)
train: $(T_B)/ops/libgradd_train.a $(T_SHARED:%=$(T_B)/ops/%)
endif
NATIVE_TRAIN := $(B)/train/native/libgradd_train.a
ifneq ($(TARGET),native)
$(NATIVE_TRAIN): FORCE | $(GEN)
	@$(MAKE) --no-print-directory TARGET=native OPS= TYPES= $@
endif
$(B)/train/families: tools/train_families.c $(NATIVE_TRAIN)
	$(Q)$(CC) -std=gnu11 -O1 -D_GNU_SOURCE -fopenmp -I. -I$(B)/gen $(WARN) -Wl,--gc-sections \
	    -Wl,--wrap=gradd_op_find,--wrap=gradd_op_by_name,--wrap=gradd_op_infer -o $@ $^ -lm
$(T_B)/ops/gen/needs.txt: $(B)/train/families $(T_OPS) FORCE
	$(call put_list,$< $(T_OPS))
$(T_B)/ops/gen/op_list.inc: $(T_B)/ops/gen/needs.txt
	$(call put_list,sed -n 's/^family \(.*\)/X(\1)/p' $<)
$(T_B)/ops/gen/cpu_list.inc: $(T_B)/ops/gen/op_list.inc
	$(call put_list,grep -Fxf $(B)/gen/cpu_list.inc $<)
$(T_B)/ops/gen/pass_list.inc: $(T_B)/ops/gen/needs.txt
	$(call put_list,sed -n 's/^pass \(.*\)/X(\1)/p' $<)
$(T_B)/ops/gen/types.h: $(T_B)/ops/gen/needs.txt FORCE
	$(call put_list,sed -n $(if $(findstring f64,$(TYPES)),-e /F64/d) \
	    $(if $(findstring f16,$(TYPES)),-e /HALVES/d) -e 's/^without /\#define GRADD_NO_/p' $<)
$(T_B)/ops/%.o: %.c | $(T_OPS_GEN)
	@mkdir -p $(@D); echo "  CC      $< ($(TARGET), for $(OPS))"
	$(Q)$(T_CC) -I$(T_B)/ops/gen -include $(T_B)/ops/gen/types.h $(T_CPPFLAGS) $(T_CFLAGS) \
	    $(T_WARN) -MMD -MP -c $< -o $@
$(T_OPS_OBJ): $(T_B)/flags.txt | $(GEN) $(PB_C:.c=.h) $(T_B)/include/protobuf-c
$(T_B)/ops/libgradd_train.a: $(T_OPS_OBJ)
	@echo "  AR      $@"; rm -f $@; $(T_AR) rcs $@ $^
ifneq ($(T_SHARED),)
$(T_B)/$(T_SHARED): $(T_OBJ) $(T_B)/members.txt tools/train.map
	$(t_share)
$(T_B)/ops/$(T_SHARED): $(T_OPS_OBJ) tools/train.map
	$(t_share)
endif

# A program that uses nothing else, for the tests; emulated where the machine is another one.
T_RUN_aarch64 := qemu-aarch64 -L /usr/aarch64-linux-gnu
T_RUN_armhf   := qemu-arm -L /usr/arm-linux-gnueabihf
T_RUN_riscv64 := qemu-riscv64 -L /usr/riscv64-linux-gnu
T_RUN_wasm    := node --no-experimental-fetch # emscripten 3.1 takes it for a browser's
T_RUN_windows := env WINEDEBUG=-all wine
# Where Debian has the modules that emscripten needs, whatever node finds them.
$(B)/train/wasm/device_program.js: export NODE_PATH := /usr/share/nodejs
T_PROGRAM_wasm    := .js
T_PROGRAM_windows := .exe
T_PROGRAM     := $(T_B)/device_program$(T_PROGRAM_$(TARGET))
$(T_B)/device_program: tests/c/train/device_program.c $(T_B)/libgradd_train.so
	$(Q)$(T_CC) -std=gnu11 -O1 -I. $(T_WARN) -o $@ $< -L$(T_B) -lgradd_train -Wl,-rpath,'$$ORIGIN'
# The same for C++.
$(T_B)/device_program_cpp: tests/c/train/device_program.cc train/gradd_train.hpp \
    train/gradd_train.h $(T_B)/libgradd_train.so
	$(Q)$(CXX) -std=gnu++17 -O1 -I. -Wall -Wextra -o $@ $< -L$(T_B) -lgradd_train \
	    -Wl,-rpath,'$$ORIGIN'
$(T_B)/device_program.exe: tests/c/train/device_program.c $(T_B)/gradd_train.dll
	$(Q)$(T_CC) -std=gnu11 -O1 -D_GNU_SOURCE -I. $(T_WARN) -o $@ $< $(T_B)/gradd_train.dll
$(T_B)/device_program.js: tests/c/train/device_program.c $(T_B)/libgradd_train.a
	$(Q)$(T_CC) -std=gnu11 -Os -I. $(T_ARCH_wasm) -sALLOW_MEMORY_GROWTH=1 -o $@ $^ -lm
.PHONY: train-run
train-run: $(T_PROGRAM) ## the bits of three trainings: make train-run TARGET=aarch64
	@$(T_RUN_$(TARGET)) $(T_PROGRAM)

# Hashes of operators' results, of cases in the file CASES (tests/c/train/case_bits.c).
T_CASES   := $(T_B)/case_bits$(if $(filter wasm,$(TARGET)),.js)
CASE_SRC  := tests/c/train/case_bits.c kernels/cases/cases.c kernels/cases/case_export.c
t_cases    = $(Q)$(T_CC) -std=gnu11 -O1 $(T_CPPFLAGS) $(T_ARCH_$(TARGET)) $(T_OMP) $(T_WARN) -o $@ \
    $(filter %.c %.o,$^) $(T_B)/libgradd_train.a -lm
$(T_B)/case_bits: $(CASE_SRC) $(T_B)/libgradd_train.a
	$(t_cases)
$(T_B)/case_bits.js: $(CASE_SRC) $(T_B)/libgradd_train.a
	$(t_cases) -sALLOW_MEMORY_GROWTH=1
.PHONY: train-cases
train-cases: $(T_CASES) ## hashes of results: make train-cases TARGET=aarch64 CASES=file
	@$(T_RUN_$(TARGET)) $(T_CASES) < $(CASES)
# The same with some kernels for the shortest vectors that this machine has, and with the engine of
# the daemon, which has them for the longest.
SHORT_OBJ := $(patsubst %,$(T_B)/short/%.o,kernels/cpu/softmax_rows kernels/ops/norm/softmax \
             kernels/ops/norm/groupnorm)
$(T_B)/short/%.o: %.c $(T_B)/flags.txt | $(GEN)
	@mkdir -p $(@D); echo "  CC      $< (short vectors)"
	$(Q)$(T_CC) $(T_CPPFLAGS) $(filter-out -march=%,$(T_CFLAGS)) $(T_WARN) -MMD -MP -c $< -o $@
$(T_B)/case_bits_short: $(CASE_SRC) $(SHORT_OBJ) $(T_B)/libgradd_train.a
	$(t_cases)
$(B)/bin/case_bits: tests/c/train/case_bits.c $(B)/lib/libgradd.so
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(WARN) -o $@ $< -L$(B)/lib -lgradd -lm \
	    -Wl,-rpath,'$$ORIGIN/../lib'
-include $(T_OBJ:.o=.d) $(T_OPS_OBJ:.o=.d) $(SHORT_OBJ:.o=.d)

# The inner loops of products, on x86-64 also for 512 bits: a step of a small MLP takes 1.8 times as
# long without, and the library 50 KB less.
$(T_B)/kernels/cpu/gemm/gemm_blocked.o $(T_B)/ops/kernels/cpu/gemm/gemm_blocked.o: \
    T_CFLAGS += -O3 -UGRADD_NO_WIDE
# What copies the windows of a convolution: a step of a small network takes 1.3 times as long
# without, and the library 12 KB less.
$(T_B)/kernels/cpu/conv/conv_columns.o $(T_B)/ops/kernels/cpu/conv/conv_columns.o: T_CFLAGS += -O3
