/* Devices of the stand-in: two, or those that CUDA_VISIBLE_DEVICES leaves. See sim.h. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/internal.h"

enum { UNITS = 2 }; /* few blocks for much work: loops go round */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int visible[SIM_DEVICES], n_visible; /* their numbers on the machine, by those of CUDA */
static _Thread_local int current;

static void uuid_of(int number, unsigned char *out) {
    memset(out, 0x5e, sizeof(cudaUUID_t));
    out[sizeof(cudaUUID_t) - 1] = (unsigned char)number;
}

static bool is_named(const char *word, int number) {
    char text[64], *end;
    unsigned char uuid[16];
    if (strtol(word, &end, 10) == number && end != word && !*end) return true;
    uuid_of(number, uuid);
    int n = snprintf(text, sizeof text, "GPU-");
    for (int i = 0; i < 16; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%02x",
                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    return !strcmp(word, text);
}

/* As the driver does, it stops at the first word that names no device. */
static void see(const char *text) {
    char *words = strdup(text ? text : "0,1"), *rest = words, *word;
    n_visible = 0;
    while ((word = strsep(&rest, ",")) && n_visible < SIM_DEVICES) {
        int number = 0;
        while (number < SIM_DEVICES && !is_named(word, number))
            number++;
        if (number == SIM_DEVICES) break;
        visible[n_visible++] = number;
    }
    free(words);
}

static void read_environment(void) {
    see(getenv("CUDA_VISIBLE_DEVICES"));
}

void sim_see(const char *devices) {
    pthread_once(&once, read_environment);
    see(devices);
}

static bool is_device(int device) {
    pthread_once(&once, read_environment);
    return device >= 0 && device < n_visible;
}

int sim_device(void) {
    return is_device(current) ? visible[current] : -1;
}

int sim_device_number(int device) {
    return is_device(device) ? visible[device] : -1;
}

int sim_device_of(int number) {
    for (int i = 0; is_device(i); i++)
        if (visible[i] == number) return i;
    return -1;
}

/* ---- calls ----------------------------------------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *out) {
    *out = sim_settings()->driver;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out) {
    SIM_CALL(cudaErrorNoDevice);
    is_device(0);
    *out = n_visible;
    return sim_failed(n_visible ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device) {
    SIM_CALL(cudaErrorInvalidDevice);
    if (!is_device(device)) return sim_failed(cudaErrorInvalidDevice);
    *out = (cudaDeviceProp){.major = 9, .multiProcessorCount = UNITS};
    snprintf(out->name, sizeof out->name, "an emulated GPU");
    uuid_of(visible[device], (unsigned char *)out->uuid.bytes);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr attribute, int device) {
    SIM_CALL(cudaErrorInvalidValue);
    if (!is_device(device)) return sim_failed(cudaErrorInvalidDevice);
    if (attribute != cudaDevAttrMaxSharedMemoryPerBlockOptin)
        return sim_failed(cudaErrorInvalidValue);
    *out = sim_shared_most();
    return cudaSuccess;
}

int sim_shared_most(void) {
    return sim_settings()->shared ? sim_settings()->shared : SIM_SHARED;
}

bool sim_takes_shared(size_t bytes) {
    return !sim_failed(bytes > (size_t)sim_shared_most() ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
    SIM_CALL(cudaErrorInvalidDevice);
    if (!is_device(device)) return sim_failed(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out) {
    SIM_CALL(cudaErrorInvalidDevice);
    *out = current;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *out_free, size_t *out_total) {
    SIM_CALL(cudaErrorInvalidValue);
    const size_t used = sim_bytes_of(sim_device());
    *out_total = sim_memory_limit();
    *out_free = used < *out_total ? *out_total - used : 0;
    return cudaSuccess;
}
