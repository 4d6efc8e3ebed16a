/* The device that tests run on, named by GRADD_TEST_DEVICE (the CPU if it is not set), and memory
 * that both it and the test see. */
#ifndef GRADD_TESTS_C_GROUND_H
#define GRADD_TESTS_C_GROUND_H

#include "server/device/device.h"
#include "shm/segment.h"

const gradd_backend_t *ground_backend(void);
/* As many threads as it can have, of those that the test would like. */
int ground_threads(int wanted);
/* Opens it with ground_threads(threads). Closed with gradd_device_close. */
gradd_device_t *ground_open(int threads);

/* The operator that GRADD_TEST_OP names, NULL where it names none. The test fails if there is no
 * such operator: else a slip would pass, as nothing is tried. */
const char *ground_only(void);
/* After all cases were tried: fails if none was, but for one operator alone is skipped. */
void ground_tried(int n);

/* Memory of `bytes` zero bytes that the test sees at `host`, and so do its children. */
typedef struct ground_s {
    gradd_segment_t segment;
    char *host;
    /* The same, mapped by a device; host where the device takes addresses of the process. */
    const gradd_mapper_t *mapper;
    void *device;
} ground_t;

ground_t ground_make(size_t bytes);
void ground_free(ground_t *ground);
/* From here on ground_at gives addresses of that device, until ground_leave. */
void ground_enter(ground_t *ground, const gradd_device_t *device);
void ground_leave(ground_t *ground);
/* The device's address of what the test sees there; NULL stays NULL. */
void *ground_at(const ground_t *ground, const void *host);

/* One call of a kernel of ground_backend(): operands and scratch lie in the test's memory and are
 * followed by `behind` bytes, which are taken there and back as well. Waits. */
gradd_status_t ground_call(const gradd_kernel_t *kernel, const gradd_launch_t *launch,
                           size_t workspace, size_t behind);
/* The same of another device, one in a process. */
gradd_status_t ground_call_on(const gradd_backend_t *backend, const gradd_kernel_t *kernel,
                              const gradd_launch_t *launch, size_t workspace, size_t behind);

#endif
