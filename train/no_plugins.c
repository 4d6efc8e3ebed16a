/* A library for a device has no devices in files of their own: in the place of plugin.c. */
#include "kernels/contract/plugin.h"

gradd_status_t gradd_plugin_load(const char *name, const gradd_backend_t **out) {
    (void)out;
    return GRADD_FAIL(UNSUPPORTED, "there is no device '%s'", name);
}
