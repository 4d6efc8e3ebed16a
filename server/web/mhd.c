/* See mhd.h. */
#include "server/web/mhd.h"

#include <dlfcn.h>
#include <string.h>

#define LIBRARY "libmicrohttpd.so.12"

gradd_status_t mhd_open(mhd_t *out_mhd) {
    mhd_t mhd;
    const struct {
        const char *name;
        void *at; /* a pointer to a function */
    } rows[] = {
        {"MHD_start_daemon",                &mhd.start_daemon    },
        {"MHD_stop_daemon",                 &mhd.stop_daemon     },
        {"MHD_create_response_from_buffer", &mhd.create_response },
        {"MHD_add_response_header",         &mhd.add_header      },
        {"MHD_queue_response",              &mhd.queue_response  },
        {"MHD_destroy_response",            &mhd.destroy_response},
    };
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return GRADD_FAIL(UNSUPPORTED,
                          "web: %s cannot be opened (%s): install libmicrohttpd, on Debian and "
                          "Ubuntu the package libmicrohttpd12",
                          LIBRARY, dlerror());
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        void *symbol = dlsym(library, rows[i].name);
        if (!symbol) return GRADD_FAIL(UNSUPPORTED, "web: %s has no %s", LIBRARY, rows[i].name);
        memcpy(rows[i].at, &symbol, sizeof symbol);
    }
    *out_mhd = mhd;
    return GRADD_OK;
}
