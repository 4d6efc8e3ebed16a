/* See doctor.h. */
#include "server/cli/doctor.h"

#include <unistd.h>

#include "kernels/plugin.h"
#include "server/daemon/machine.h"

static void describe(FILE *out, const gradd_backend_t *backend, const char *what) {
    size_t n = 0;
    for (size_t f = 0; f < backend->n_kernels; f++)
        n += backend->kernels[f]->n;
    fprintf(out, "device %s: %s; products by %s, bf16 %s; %zu kernels\n", backend->name, what,
            backend->library(), backend->multiplies(GRADD_DT_BF16) ? "native" : "widened", n);
    if (backend->kept) fprintf(out, "  %s\n", backend->kept());
}

static void look_for(FILE *out, const char *name) {
    const gradd_backend_t *backend;
    const char *path = gradd_plugin_path(name);
    if (access(path, R_OK))
        fprintf(out, "device %s: no plug-in at %s (`make %s` builds it)\n", name, path, name);
    else if (gradd_plugin_load(name, &backend))
        fprintf(out, "device %s: %s (%s)\n", name, gradd_error_message(), path);
    else
        describe(out, backend, path);
}

void doctor(FILE *out) {
    fprintf(out, "processors: %d\n", machine_processors());
    for (size_t i = 0; i < gradd_backend_count; i++)
        describe(out, gradd_backends[i], "of this build");
    look_for(out, "cuda");
}
