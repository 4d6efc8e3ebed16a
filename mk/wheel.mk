# Wheels: `gradd` (with the daemon, libgradd and the libraries that they link), `gradd-train` (with
# the library for devices) and `optimum-gradd`.

# libzmq and libsodium are those of pyzmq's wheel: a distribution's libzmq may need pgm, norm and
# gssapi. protobuf-c and msgpack are linked statically, oneDNN and libgomp lie beside the binary.
WHEEL_B     := $(B)/wheel
DIST        ?= dist
WHEEL_TREE  := $(WHEEL_B)/native
WHEEL_ZMQ    = $(or $(firstword $(wildcard $(VENV)/lib/python*/site-packages/pyzmq.libs/libzmq-*)),\
                    $(error pyzmq in $(VENV) brings no libzmq: reinstall it as a wheel))
STATIC       = $(patsubst -l%,-l:lib%.a,$(filter -l%,$(1)))
WHEEL_FOUND := -Wl,-rpath,'$$ORIGIN/../lib'
WHEEL_FOUND_BESIDE := -Wl,-rpath,'$$ORIGIN'
WHEEL_ENGINE = $(filter-out -Wl$(comma)-rpath%,$(DNNL_LIBS)) $(call STATIC,$(PROTO_LIBS)) \
               -ldl -lpthread -lm
WHEEL_DAEMON = $(WHEEL_ZMQ) -Wl,-rpath-link,$(dir $(WHEEL_ZMQ)) $(call STATIC,$(MSGPACK_LIBS)) \
               $(WHEEL_ENGINE)

WHEEL_TRAIN := $(WHEEL_B)/train/libgradd_train.so
wheel: $(WHEEL_TREE)/bin/gradd $(WHEEL_TREE)/lib/libgradd.so $(WHEEL_TRAIN) \
    ## build the wheels into dist/
	@$(PY) tools/wheel.py $(WHEEL_B) $(VENV) --out $(DIST) $(if $(wildcard $(B)/lib/libgradd_cuda.so),\
	    --plugin $(B)/lib/libgradd_cuda.so)

$(WHEEL_TREE)/bin/gradd: $(DAEMON_OBJ) $(ENGINE_OBJ)
	$(call link,$(PLUGIN_HOST) $(WHEEL_FOUND) $(WHEEL_DAEMON))
$(WHEEL_TREE)/lib/libgradd.so: $(ENGINE_OBJ) $(B)/gen/engine_members.txt tools/exports.map
	$(call share,$(WHEEL_FOUND) $(WHEEL_ENGINE))
$(WHEEL_TRAIN): $(B)/train/native/libgradd_train.a tools/train.map # which finds OpenMP beside it
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CC) -shared -Os $(T_OMP) $(LDFLAGS) -Wl,-z,defs -Wl,-z,relro,-z,now -Wl,--gc-sections \
	    -Wl,-soname,$(@F) $(WHEEL_FOUND_BESIDE) -Wl,--version-script=tools/train.map -o $@ \
	    -Wl,--whole-archive $< -Wl,--no-whole-archive -lm && strip $@
