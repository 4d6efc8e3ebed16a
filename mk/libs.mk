# Tools and libraries found on the machine, and the flags for compiling and linking.

ZMQ_CFLAGS  := $(shell $(PKG_CONFIG) --cflags libzmq 2>/dev/null)
ZMQ_LIBS    := $(or $(shell $(PKG_CONFIG) --libs libzmq 2>/dev/null),-lzmq)
MSGPACK_PC  := $(shell for p in msgpack-c msgpack; do \
                   $(PKG_CONFIG) --exists $$p 2>/dev/null && echo $$p && break; done)
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

# -ffp-contract=off: a*b+c is rounded as it is written, whatever the compiler vectorises or inlines,
# so the plain reference and a faster version, or a loop's body and its tail, give the same bits.
# Kernels that want a fused multiply-add call fmaf. Errno and trap semantics of libm are not used.
OPTIMISE := $(if $(filter 1,$(DEBUG)),-O0 -g3,-O3 -g)
SANITIZE := $(if $(filter 1,$(ASAN)),-fsanitize=address) \
            $(if $(filter 1,$(UBSAN)),-fsanitize=undefined -fno-sanitize-recover=undefined) \
            $(if $(filter 1,$(TSAN)),-fsanitize=thread)
SANITIZE := $(strip $(SANITIZE))
ifneq ($(SANITIZE),)
OPTIMISE := -O1 -g -fno-omit-frame-pointer
endif
HARDEN   := $(if $(SANITIZE)$(filter 1,$(DEBUG)),,-D_FORTIFY_SOURCE=3) -fstack-protector-strong \
            -fstack-clash-protection \
            $(if $(filter x86_64,$(MACHINE)),-fcf-protection,-mbranch-protection=standard)
# maybe-uninitialized depends on what this compiler version inlines and does not see through the
# house idiom (results are written only on success): it warns, but does not stop the build.
WARN     := -Wall -Wextra -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
            $(if $(filter 1,$(WERROR)),-Werror -Wno-error=maybe-uninitialized) \
            $(if $(SANITIZE),-Wno-maybe-uninitialized)
CPPFLAGS_ALL = -D_GNU_SOURCE -I. -I$(B)/gen $(ZMQ_CFLAGS) $(MSGPACK_CFLAGS) $(PROTO_CFLAGS) \
               $(DNNL_CFLAGS) $(CPPFLAGS)
CFLAGS_ALL   = -std=gnu11 $(OPTIMISE) $(ARCH) -fopenmp -fPIC -ffp-contract=off -fno-math-errno \
               -fno-trapping-math $(HARDEN) $(SANITIZE) $(CFLAGS)
# Kernels of GPUs as C++ for the host: the words of CUDA are functions there (tests/emu/emu.h).
CXXFLAGS_ALL = -std=gnu++20 $(if $(SANITIZE),$(OPTIMISE),-O1 -g1) $(ARCH) -fPIC -ffp-contract=off \
               -fno-math-errno -fno-trapping-math -fno-exceptions -fno-rtti \
               -Itests/emu -Itests/sim $(SANITIZE) \
               -Wall -Wno-unknown-pragmas -Wno-deprecated-enum-enum-conversion \
               $(if $(filter 1,$(WERROR)),-Werror) $(CXXFLAGS)
# The build id tells a client that the daemon is older than the binary (server/daemon/build.h).
LDFLAGS_ALL  = $(SANITIZE) -fopenmp -Wl,-z,relro,-z,now -Wl,--build-id=sha1 $(LDFLAGS)
# A plug-in finds the gradd symbols that it needs in the program, which holds the whole engine.
PLUGIN_HOST  = -Wl,--export-dynamic-symbol='gradd_*'
# The stand-in for NCCL finds that for CUDA in the program of the tests.
SIM_HOST     = -Wl,--export-dynamic-symbol='sim_*'
ENGINE_LIBS  = $(DNNL_LIBS) $(PROTO_LIBS) -ldl -lpthread -lm
DAEMON_LIBS  = $(ZMQ_LIBS) $(MSGPACK_LIBS) $(ENGINE_LIBS)
