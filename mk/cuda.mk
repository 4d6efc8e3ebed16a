# The CUDA plug-in, built on demand, and the bundle for a machine with a GPU.

# nvcc from the path or CUDA_HOME; cuBLASLt's header and library from CUDA_LIBS, a folder with
# include/ and lib/: the Python packages of `make cuda-deps`, or a toolkit. cudart is linked
# statically and the driver found at run time, so the plug-in loads wherever libcublasLt does.
CUDA_LIBS  ?= $(or $(patsubst %/include/cublasLt.h,%,$(firstword $(wildcard \
                  $(VENV)/lib/python*/site-packages/nvidia/cu13/include/cublasLt.h \
                  $(CUDA_HOME)/include/cublasLt.h))),$(CUDA_HOME))
CUDA_ARCHS ?= -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a \
              -gencode=arch=compute_90,code=compute_90
NVFLAGS    := -std=c++20 -O3 -fmad=false --threads 2 --compress-mode=size $(CUDA_ARCHS) \
              -I. -I$(B)/gen -I$(CUDA_LIBS)/include \
              -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas -Xptxas -v
CUDA_OBJ   := $(CUDA_SRC:%.cu=$(B)/cuda/%.o)
CUBLASLT    = $(or $(firstword $(wildcard \
                  $(addsuffix /libcublasLt.so.13,$(CUDA_LIBS)/lib $(CUDA_LIBS)/lib64))),\
                  $(error no libcublasLt.so.13 below $(CUDA_LIBS): make cuda-deps, or CUDA_LIBS=))
CUDART      = $(firstword $(wildcard $(addsuffix /libcudart_static.a,\
                  $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib $(CUDA_LIBS)/lib)))

cuda: $(B)/lib/libgradd_cuda.so $(BIN) ## build the CUDA plug-in (nvcc, `make cuda-deps`)
	@$(PY) tools/gpu/symbols.py $^

cuda-deps: ## install what the plug-in is built with: cuBLASLt, cuobjdump (large)
	@$(PY) -m pip install -q nvidia-cublas==13.1.1.3 nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-cuobjdump \
	    nvidia-cuda-nvdisasm \
	    $(if $(shell command -v $(NVCC)),,'cuda-toolkit[nvcc,crt,cccl,cudart]==13.0.3')

$(B)/cuda/%.o: %.cu $(B)/gen/cuda_list.inc
	@mkdir -p $(@D); echo "  NVCC    $<"
	$(Q)$(NVCC) $(NVFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2> $(@:.o=.ptxas) \
	    || { cat $(@:.o=.ptxas); exit 1; }

# Its gradd_* symbols are the program's, which loads it.
$(B)/lib/libgradd_cuda.so: $(CUDA_OBJ) tools/gpu/gates.py
	@$(PY) tools/gpu/gates.py $(CUDA_OBJ)
	@mkdir -p $(@D); echo "  LD      $@"
	$(Q)$(CXX) -shared -Wl,-z,relro,-z,now -Wl,-rpath,$(abspath $(dir $(CUBLASLT))) \
	    -o $@ $(CUDA_OBJ) $(CUBLASLT) $(CUDART) -lrt -lpthread -ldl
-include $(CUDA_OBJ:.o=.d)

# The bundle for a machine with a GPU: daemon, tests and probes without oneDNN (it is large), the
# plug-in, the shared libraries that such a machine may lack, wheels for its Python, models, and
# small graphs with PyTorch's gradients. libcublasLt is its own.
GPU_B := $(B)/gpu
GPU_PY = GRADD_BIN=$(abspath $(B)/bin/gradd) PYTHONPATH=adapters/python:tests/python \
         GRADD_SELF_CHECK=0 $(PY)
GPU_PYTHON ?= 3.12
# Of the bundle and the tree together.
GPU_MIB ?= 64
# Libraries that every machine has.
GPU_HAS := libc|libm|libdl|librt|libresolv|libpthread|libstdc\+\+|libgcc_s|ld-linux[^/]*
gpu-bundle: cuda $(GPU_B)/bin/probe ## collect in build/gpu what tools/gpu/run.sh needs
	@$(MAKE) --no-print-directory ONEDNN=none B=$(GPU_B) \
	    $(addprefix $(GPU_B)/bin/,gradd tests bench_engine)
	@$(MAKE) --no-print-directory all
	@mkdir -p $(GPU_B)/models; for shape in 1b 8b; do \
	    [ $$shape = 8b ] || [ -e $(GPU_B)/models/$$shape.onnx ] || $(GPU_PY) tools/gpu/llama.py \
	        capture $$shape $(GPU_B)/models/$$shape.onnx || exit 1; \
	    for size in 1x2048 4x2048; do $(GPU_PY) tools/gpu/llama.py graph $$shape $$size \
	        $(GPU_B)/models/attention-$$shape-$$size.onnx || exit 1; done; done
	@rm -rf $(GPU_B)/bundles; $(GPU_PY) tools/gpu/bundles.py make $(GPU_B)/bundles
	@for wheel in pyzmq liger-kernel; do \
	    $(PY) -m pip download -q --no-deps --only-binary=:all: --implementation cp \
	    -d $(GPU_B)/wheels --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 \
	    --platform manylinux_2_17_x86_64 --platform any $$wheel || exit 1; done
	@mkdir -p $(GPU_B)/lib; cp $(B)/lib/libgradd_cuda.so $(GPU_B)/lib/
	@for f in $$(ldd $(GPU_B)/bin/gradd | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | grep -vE \
	    '/($(GPU_HAS))\.so'); do \
	    cp -L $$f $(GPU_B)/lib/; done
	@strip $(GPU_B)/bin/* $(GPU_B)/lib/*.so*; rm -rf $(GPU_B)/lib/*.a $(addprefix $(GPU_B)/,\
	    gen gen-obj shm kernels server tests emu fake benchmarks)
	@bundle=$$(du -sb $(GPU_B) | cut -f1); \
	    tree=$$(git ls-files -z | du -cb --files0-from=- 2>/dev/null | tail -n 1 | cut -f1); \
	    echo "  SIZE    $$((bundle >> 20)) MiB in $(GPU_B), $$((tree >> 20)) MiB of tracked files"; \
	    [ $$((bundle + tree)) -le $$(($(GPU_MIB) << 20)) ] || \
	    { echo "more than $(GPU_MIB) MiB do not travel to the machine with the GPU"; exit 1; }
$(GPU_B)/bin/probe: tools/gpu/probe.cu tools/gpu/probe_shared.cu tools/gpu/probe.h \
    tools/gpu/json_error.h $(wildcard kernels/math/*.h kernels/cuda/half.h)
	@mkdir -p $(@D); echo "  NVCC    $<"
	$(Q)$(NVCC) -std=c++20 -O2 $(CUDA_ARCHS) -I. -I$(CUDA_LIBS)/include $(filter %.cu,$^) -o $@ -ldl
