# The library for devices in other languages: Java by JNI, Rust, C#, and a module map for Swift and
# Objective-C. Each is built by its language's own compiler alone, offline.
J_B    := $(T_B)/java
J_SRC  := $(sort $(wildcard train/java/ai/gradd/train/*.java))
J_HEAD := $(J_B)/ai_gradd_train_Native.h
J_MACHINE = $$(dirname $$(find $(JAVA_HOME)/include/ -name jni_md.h | head -n 1))
train-java: JAVA_HOME ?= $(abspath $(dir $(realpath $(shell command -v javac)))..)
.PHONY: train-java
train-java: $(T_B)/gradd-train.jar $(T_B)/libgradd_train_jni.so ## the library for devices, for Java
# javac also writes the declarations of the native methods.
$(T_B)/gradd-train.jar: $(J_SRC)
	@rm -rf $(J_B); mkdir -p $(J_B); echo "  JAVAC   $@"
	$(Q)javac -Xlint:all -Werror --release 11 -h $(J_B) -d $(J_B)/classes $^
	$(Q)jar --create --file $@ -C $(J_B)/classes .
$(T_B)/libgradd_train_jni.so: train/java/gradd_train_jni.c train/gradd_train.h \
    $(T_B)/gradd-train.jar $(T_B)/libgradd_train.so
	@echo "  LD      $@"
	$(Q)$(T_CC) -std=gnu11 -Os -shared -fPIC -I. -I$(JAVA_HOME)/include -I$(J_MACHINE) \
	    -include $(J_HEAD) $(T_WARN) -fvisibility=hidden -o $@ $< -L$(T_B) -lgradd_train \
	    -Wl,-z,defs -Wl,-rpath,'$$ORIGIN'

# The crate, and as its example the program of the tests.
.PHONY: train-rust
train-rust: $(T_B)/libgradd_train.so ## the library for devices, for Rust
	@echo "  CARGO   $(T_B)/rust"
	$(Q)GRADD_TRAIN_LIB=$(abspath $(T_B)) cargo build --quiet --offline --release --lib --examples \
	    --manifest-path train/rust/Cargo.toml --target-dir $(abspath $(T_B))/rust

CS_SRC := $(sort $(wildcard train/csharp/*.cs))
.PHONY: train-csharp
train-csharp: $(T_B)/Gradd.Train.dll ## the library for devices, for C#
$(T_B)/Gradd.Train.dll: $(CS_SRC) $(T_B)/libgradd_train.so
	@echo "  MCS     $@"
	$(Q)mcs -unsafe -warnaserror -warn:4 -target:library -out:$@ $(CS_SRC)
