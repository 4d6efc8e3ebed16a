/* See plugin.h. */
#include "kernels/plugin.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 4 };

typedef struct loaded_s {
    char name[32];
    const gradd_backend_t *table;
} loaded_t;

static loaded_t loaded[MOST];
static int n_loaded;

static bool is_name(const char *name) {
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++)
        if (!islower((unsigned char)name[i]) && !isdigit((unsigned char)name[i])) return false;
    return n && n < sizeof loaded[0].name;
}

/* The folder of the running program, without its last part; "" if that is not known. */
static void own_folder(char *out, size_t bytes) {
    const ssize_t n = readlink("/proc/self/exe", out, bytes - 1);
    out[n < 0 ? 0 : n] = 0;
    char *slash = strrchr(out, '/');
    if (slash) *slash = 0;
}

const char *gradd_plugin_path(const char *name) {
    static char path[4300];
    char folder[4096];
    const char *given = getenv("GRADD_PLUGINS");
    if (!is_name(name)) return NULL;
    if (given && *given) {
        snprintf(path, sizeof path, "%s/libgradd_%s.so", given, name);
        return path;
    }
    own_folder(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/../lib/libgradd_%s.so", folder, name);
    return path;
}

static gradd_status_t load(const char *name, const char *path, const gradd_backend_t **out) {
    gradd_plugin_t entry;
    if (access(path, R_OK)) {
        if (strcmp(name, GRADD_PLUGIN_CUDA))
            return GRADD_FAIL(UNSUPPORTED, "there is no device '%.60s'", name);
        return GRADD_FAIL(DEVICE, "there is no plug-in at %s (`make cuda` builds it)", path);
    }
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!object) return GRADD_FAIL(DEVICE, "the plug-in %s cannot be used: %s", path, dlerror());
    void *symbol = dlsym(object, GRADD_PLUGIN_ENTRY);
    if (!symbol) return GRADD_FAIL(DEVICE, "%s is no plug-in of gradd", path);
    memcpy(&entry, &symbol, sizeof entry);
    GRADD_TRY(entry(GRADD_BACKEND_ABI, out));
    if ((*out)->abi == GRADD_BACKEND_ABI && (*out)->size >= sizeof(gradd_backend_t))
        return GRADD_OK;
    return GRADD_FAIL(VERSION, "the plug-in '%s' has version %u of the device table, expected %u",
                      name, (*out)->abi, GRADD_BACKEND_ABI);
}

gradd_status_t gradd_plugin_load(const char *name, const gradd_backend_t **out) {
    for (int i = 0; i < n_loaded; i++)
        if (!strcmp(loaded[i].name, name)) {
            *out = loaded[i].table;
            return GRADD_OK;
        }
    const char *path = gradd_plugin_path(name);
    if (!path || n_loaded == MOST)
        return GRADD_FAIL(UNSUPPORTED, "there is no device '%.60s'", name);
    GRADD_TRY(load(name, path, out));
    snprintf(loaded[n_loaded].name, sizeof loaded[0].name, "%s", name);
    loaded[n_loaded++].table = *out;
    return GRADD_OK;
}
