/* Runs of neighbours among the rows of a block. Internal to attention.
 *
 * Without lists of live rows a block is one run. Among live rows a run ends where a sequence does,
 * or where rows were left out. Data per pair of positions, such as a bias, is read run by run. */
#ifndef GRADD_KERNELS_CPU_ATTENTION_ATTENTION_RUNS_H
#define GRADD_KERNELS_CPU_ATTENTION_ATTENTION_RUNS_H

#include "kernels/cpu/attention/attention_cpu.h"

typedef struct attn_run_s {
    int64_t at, n;       /* rows of the block */
    int64_t b, position; /* of the first one, among all rows */
} attn_run_t;

typedef struct attn_runs_s {
    int n;
    attn_run_t v[GRADD_ATTN_TILE];
} attn_runs_t;

/* Of rows [first, first + n), n <= 64, of sequence b where there is no list. */
static inline void attn_find_runs(const int64_t *list, int64_t positions, int64_t b, int64_t first,
                                  int64_t n, attn_runs_t *out) {
    out->n = 0;
    if (!list) {
        out->v[out->n++] = (attn_run_t){0, n, b, first};
        return;
    }
    list += first;
    for (int64_t i = 0, next; i < n; i = next) {
        const int64_t s = list[i] % positions;
        for (next = i + 1; next < n && s + next - i < positions; next++)
            if (list[next] != list[i] + next - i) break;
        out->v[out->n++] = (attn_run_t){i, next - i, list[i] / positions, s};
    }
}

#endif
