/* Errors that values can cause at run time: one list of sentences for all devices.
 *
 * A CPU kernel fails with gradd_fault_fail at once. A kernel that runs later records the first
 * offender in a gradd_fault_t of its device, from which the waiting thread makes the same sentence.
 */
#ifndef GRADD_KERNELS_CONTRACT_FAULT_H
#define GRADD_KERNELS_CONTRACT_FAULT_H

#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradd_fault_kind_e {
    GRADD_FAULT_NONE = 0,
    GRADD_FAULT_INDEX,        /* value, limit, position */
    GRADD_FAULT_TABLE_INDEX,  /* the same, table */
    GRADD_FAULT_LABEL,        /* value, limit, row */
    GRADD_FAULT_ZERO_DIVISOR, /* position */
    GRADD_FAULT_PROBABILITY,  /* the bits of a double in value, position */
    GRADD_FAULT_RATIO,        /* the same, without position */
    GRADD_FAULT_LIVE_ROW,     /* value, limit, entry */
    GRADD_FAULT_LIVE_ORDER,   /* value, the one before in limit, entry */
    GRADD_FAULT_LIVE_TAIL,
    GRADD_FAULT_LIVE_OTHER, /* value */
    GRADD_FAULT_LIVE_RANGE, /* position, from in value, end in limit */
    GRADD_FAULT_GROUP_END,  /* value, rows in limit, group */
} gradd_fault_kind_t;

typedef struct gradd_fault_s {
    int32_t kind;   /* gradd_fault_kind_t */
    int32_t launch; /* whose it is */
    int64_t value, limit, position, table;
    int32_t lock; /* of the device that writes it */
} gradd_fault_t;

/* The failure (INDEX) that it is; OK for none. */
gradd_status_t gradd_fault_fail(const gradd_fault_t *fault);

#ifdef __cplusplus
}
#endif
#endif
