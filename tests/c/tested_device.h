/* The device and the operators that a run of the tests is for, by GRADD_TEST_DEVICE (the CPU if it
 * is not set) and GRADD_TEST_OP, and memory that both device and test see. */
#ifndef GRADD_TESTS_C_TESTED_DEVICE_H
#define GRADD_TESTS_C_TESTED_DEVICE_H

#include "server/device/device.h"
#include "shm/segment.h"

const gradd_backend_t *tested_backend(void);
/* `wanted` threads, or as many as the device can have. */
int tested_threads(int wanted);
/* Opens the device with tested_threads(threads). Close it with gradd_device_close. */
gradd_device_t *tested_device_open(int threads);

/* The operator that GRADD_TEST_OP names, NULL where it names none. The test fails if there is no
 * such operator, because a misspelt name would try nothing and pass. */
const char *tested_op(void);
/* To be called with the number of cases tried. 0 fails the test, or skips it where GRADD_TEST_OP
 * names an operator. */
void tested_cases(int n);

/* Memory of `bytes` zero bytes that the test sees at `host`, and so do its children. */
typedef struct shared_s {
    gradd_segment_t segment;
    char *host;
    /* The same, mapped by a device; host where the device takes addresses of the process. */
    const gradd_mapper_t *mapper;
    void *device;
} shared_t;

shared_t shared_make(size_t bytes);
void shared_free(shared_t *shared);
/* From here on shared_at gives addresses of that device, until shared_leave. */
void shared_enter(shared_t *shared, const gradd_device_t *device);
void shared_leave(shared_t *shared);
/* The device's address of what the test sees there; NULL stays NULL. */
void *shared_at(const shared_t *shared, const void *host);

/* One call of a kernel of tested_backend(): operands and scratch lie in the test's memory and are
 * followed by `behind` bytes, which are copied there and back as well. Waits. */
gradd_status_t tested_call(const gradd_kernel_t *kernel, const gradd_launch_t *launch,
                           size_t workspace, size_t behind);
/* The same of another device, one in a process. */
gradd_status_t tested_call_on(const gradd_backend_t *backend, const gradd_kernel_t *kernel,
                              const gradd_launch_t *launch, size_t workspace, size_t behind);

#endif
