/* Failures of the stand-in: which call fails, the thread's last error, and a device that is lost.
 * See sim.h. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/sim/cuda.h"
#include "tests/sim/internal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char wanted[64]; /* call that fails; "" = none */
static int left;        /* until it does */
static cudaError_t lost;
static _Thread_local cudaError_t last;

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess,                           "cudaSuccess",                          "no error"                  },
    {cudaErrorInvalidValue,                 "cudaErrorInvalidValue",                "invalid argument"          },
    {cudaErrorMemoryAllocation,             "cudaErrorMemoryAllocation",            "out of memory"             },
    {cudaErrorNoDevice,                     "cudaErrorNoDevice",                    "no CUDA-capable device"    },
    {cudaErrorInvalidDevice,                "cudaErrorInvalidDevice",               "invalid device ordinal"    },
    {cudaErrorDeviceUninitialized,          "cudaErrorDeviceUninitialized",         "invalid device context"    },
    {cudaErrorInvalidResourceHandle,        "cudaErrorInvalidResourceHandle",       "invalid resource handle"   },
    {cudaErrorNotReady,                     "cudaErrorNotReady",                    "device not ready"          },
    {cudaErrorHostMemoryAlreadyRegistered,  "cudaErrorHostMemoryAlreadyRegistered",
     "memory is registered"                                                                                     },
    {cudaErrorHostMemoryNotRegistered,      "cudaErrorHostMemoryNotRegistered",
     "memory is not registered"                                                                                 },
    {cudaErrorLaunchFailure,                "cudaErrorLaunchFailure",               "unspecified launch failure"},
    {(cudaError_t)CUDA_ERROR_NOT_SUPPORTED, "cudaErrorNotSupported",                "operation not supported"   },
};
enum { N_ERRORS = sizeof errors / sizeof errors[0] };

const char *cudaGetErrorName(cudaError_t error) {
    for (int i = 0; i < N_ERRORS; i++)
        if (errors[i].error == error) return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (int i = 0; i < N_ERRORS; i++)
        if (errors[i].error == error) return errors[i].text;
    return "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t found = sim_lost(), error = found ? found : last;
    last = cudaSuccess;
    return error;
}

sim_settings_t *sim_settings(void) {
    static sim_settings_t settings;
    return &settings;
}

void sim_fail(const char *call, int n) {
    pthread_mutex_lock(&lock);
    snprintf(wanted, sizeof wanted, "%s", call);
    left = n;
    pthread_mutex_unlock(&lock);
}

int sim_left(void) {
    pthread_mutex_lock(&lock);
    const int n = left;
    pthread_mutex_unlock(&lock);
    return n;
}

static void read_environment(void) {
    const char *text = getenv("GRADD_SIM_FAIL"), *colon = text ? strchr(text, ':') : NULL;
    if (!colon) return;
    snprintf(wanted, sizeof wanted, "%.*s", (int)(colon - text), text);
    left = atoi(colon + 1);
}

/* Whether it may happen: not if it has in another life. */
static bool first_time(void) {
    const char *file = getenv("GRADD_SIM_ONCE");
    if (!file) return true;
    const int fd = open(file, O_CREAT | O_EXCL | O_CLOEXEC | O_WRONLY, 0600);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Whether the list of words has the call, and where it ends there. */
static const char *behind(const char *list, const char *call) {
    const size_t n = strlen(call);
    for (const char *at = list; at && (at = strstr(at, call)); at += n)
        if ((at == list || at[-1] == ',') && strchr(",:", at[n])) return at + n;
    return NULL;
}

bool sim_refuses(const char *call) {
    const char *held = behind(getenv("GRADD_SIM_HOLD"), call);
    while (held && *held == ':' && access(held + 1, F_OK))
        usleep(1000);
    return behind(getenv("GRADD_SIM_REFUSE"), call);
}

bool sim_hits(const char *call) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
    pthread_mutex_lock(&lock);
    const bool hits = left > 0 && !strcmp(wanted, call) && --left == 0 && first_time();
    pthread_mutex_unlock(&lock);
    return hits;
}

cudaError_t sim_failed(cudaError_t error) {
    if (error) last = error;
    return error;
}

cudaError_t sim_failing(const char *call, cudaError_t otherwise) {
    const cudaError_t found = sim_lost();
    if (found) return found;
    if (sim_refuses(call)) return sim_failed((cudaError_t)CUDA_ERROR_NOT_SUPPORTED);
    return sim_failed(sim_hits(call) ? otherwise : cudaSuccess);
}

void sim_lose(cudaError_t error) {
    pthread_mutex_lock(&lock);
    lost = error;
    pthread_mutex_unlock(&lock);
}

void sim_recover(void) {
    pthread_mutex_lock(&lock);
    lost = cudaSuccess;
    pthread_mutex_unlock(&lock);
}

bool sim_kernel_fails(void) {
    sim_count_kernel();
    if (!sim_lost() && sim_hits("kernel")) sim_lose(cudaErrorLaunchFailure);
    return sim_lost();
}

cudaError_t sim_lost(void) {
    pthread_mutex_lock(&lock);
    const cudaError_t error = lost;
    pthread_mutex_unlock(&lock);
    return error;
}
