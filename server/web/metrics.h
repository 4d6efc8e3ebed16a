/* Metrics of the user's daemons in the text format of Prometheus.
 *
 * Labels are bounded: a row for each daemon, and within it states, kinds of memory and phases, of
 * which there are a fixed number; no name, pid or number of a session.
 */
#ifndef GRADD_SERVER_WEB_METRICS_H
#define GRADD_SERVER_WEB_METRICS_H

#include <stdio.h>

#include "server/web/web.h"

#define METRICS_DAEMONS 64
#define METRICS_VALUES  64

typedef struct metrics_s {
    struct metrics_row_s {
        char labels[160]; /* device="cpu",daemon="main" */
        double values[METRICS_VALUES];
    } rows[METRICS_DAEMONS];
    int n;
} metrics_t;

/* What one daemon says; one that does not answer counts as not up. */
void metrics_take(metrics_t *metrics, const web_daemon_t *daemon);
void metrics_print(const metrics_t *metrics, FILE *out);

#endif
