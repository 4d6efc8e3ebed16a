/* Devices in a shared object of their own, libgradd_<name>.so: looked up when one is asked for,
 * never required. If one cannot be used, one sentence says why.
 *
 * The search path is the folder GRADD_PLUGINS or else ../lib beside the running program. A plug-in
 * takes gradd_* symbols from the program (or from libgradd.so) and exports one function.
 */
#ifndef GRADD_KERNELS_CONTRACT_PLUGIN_H
#define GRADD_KERNELS_CONTRACT_PLUGIN_H

#include "kernels/contract/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The plug-in's function, GRADD_PLUGIN_ENTRY: its table, which lives as long as the process.
 * Errors: VERSION (another table than `abi`), DEVICE (no driver, or no device that it can use). */
#define GRADD_PLUGIN_ENTRY "gradd_plugin"
typedef gradd_status_t (*gradd_plugin_t)(uint32_t abi, const gradd_backend_t **out);

/* The one that this project builds. */
#define GRADD_PLUGIN_CUDA "cuda"

/* The device of that name from its plug-in, which is loaded at the first call and stays. Errors:
 * UNSUPPORTED (there is none of that name), DEVICE (there could be, but the plug-in is not there,
 * not whole or cannot be loaded), VERSION, and the plug-in's own. One thread at a time. */
gradd_status_t gradd_plugin_load(const char *name, const gradd_backend_t **out);

/* Folder in which plug-ins are looked for. */
const char *gradd_plugin_folder(void);
/* File that gradd_plugin_load would open; NULL if a name cannot be one's. */
const char *gradd_plugin_path(const char *name);

#ifdef __cplusplus
}
#endif
#endif
