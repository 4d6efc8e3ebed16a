/* libmicrohttpd, opened when it is needed: only `gradd web` is a server of HTTP. */
#ifndef GRADD_SERVER_WEB_MHD_H
#define GRADD_SERVER_WEB_MHD_H

#include <microhttpd.h>

#include "shm/status.h"

/* The functions that are used, as microhttpd.h describes them. */
typedef struct mhd_s {
    __typeof__(&MHD_start_daemon) start_daemon;
    __typeof__(&MHD_stop_daemon) stop_daemon;
    __typeof__(&MHD_create_response_from_buffer) create_response;
    __typeof__(&MHD_add_response_header) add_header;
    __typeof__(&MHD_queue_response) queue_response;
    __typeof__(&MHD_destroy_response) destroy_response;
} mhd_t;

/* Opens the library, which stays. Fails with UNSUPPORTED and the name of its package. */
gradd_status_t mhd_open(mhd_t *out_mhd);

#endif
