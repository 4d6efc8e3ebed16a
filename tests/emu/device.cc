/* What kernels of the emulated GPU go by, and the call of one of them. See device.h. */
#include "tests/emu/device.h"

#include "kernels/cuda/gpu.h"

enum { UNITS = 2 }; /* few blocks for much work: loops go round */

thread_local gpu_call_t gpu_call;

gradd_status_t gpu_launched(const char *what) {
    (void)what;
    return GRADD_OK;
}

extern "C" gradd_status_t emu_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch) {
    gradd_fault_t fault = {};
    gpu_call = {nullptr, &fault, launch->launch, UNITS};
    GRADD_TRY(kernel->compute(launch));
    return gradd_fault_fail(&fault);
}
