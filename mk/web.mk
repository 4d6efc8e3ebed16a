# The library for devices in a browser's tab, and in node: one module of WebAssembly that imports
# next to nothing, the module of JavaScript that loads it, and a page. OPS=model.onnx,... links what
# these models need alone, into $(W_B)/ops.
W_B    := $(B)/web
W_WASM := $(W_B)/$(if $(T_OPS),ops/)gradd.wasm
W_JS   := $(wildcard train/web/*.js train/web/digits/*.html train/web/digits/*.css \
          train/web/digits/*.js)
.PHONY: web
ifneq ($(TARGET),wasm)
web: $(B)/lib/libgradd_train.so ## the library for a browser and node, and a page: build/web
	@$(MAKE) --no-print-directory TARGET=wasm $@
else
web: $(W_WASM) $(W_JS:train/web/%=$(W_B)/%) $(W_B)/digits/checkpoint
endif

# platform/web.o in place of the archive's platform/wasm.o.
W_SRC := train/web/entry.c platform/web.c
W_OBJ := $(W_SRC:%.c=$(T_B)/%.o)
$(W_OBJ): $(T_B)/flags.txt
$(T_B)/train/web/entry.o: private T_WARN += -Wno-missing-prototypes # JavaScript is what calls
W_LINK := -Os $(T_ARCH_wasm) --no-entry -sSTANDALONE_WASM -sALLOW_MEMORY_GROWTH=1
$(W_B)/gradd.wasm: $(W_OBJ) $(T_B)/libgradd_train.a
$(W_B)/ops/gradd.wasm: $(W_OBJ) $(filter-out %/platform/wasm.o,$(T_OPS_OBJ))
$(W_B)/gradd.wasm $(W_B)/ops/gradd.wasm:
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(T_CC) $(W_LINK) -o $@ $^ -lm
$(W_B)/digits/checkpoint: train/web/digits/artifacts.py
	@mkdir -p $(@D); echo "  GEN     $@"
	$(Q)$(PY) $< $(@D)
$(W_B)/%: train/web/%
	@mkdir -p $(@D); cp $< $@
-include $(W_OBJ:.o=.d)
