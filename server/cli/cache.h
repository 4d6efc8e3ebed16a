/* `gradd cache`: the graphs that trainers have translated and keep on disk for the next process.
 */
#ifndef GRADD_SERVER_CLI_CACHE_H
#define GRADD_SERVER_CLI_CACHE_H

#include <stdbool.h>
#include <stdio.h>

#include "shm/status.h"

/* Counts their files, and removes them first if `clear`. Fails with IO. */
gradd_status_t cache_show(FILE *out, bool clear, bool json);

#endif
