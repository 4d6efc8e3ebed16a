/* A disk in memory that loses power: until a file is kept (the barrier of platform.h), what was
 * written to it may be forgotten, or be there in another order and torn into sectors; names may be
 * forgotten until keep_as has returned.
 */
#ifndef GRADD_TESTS_C_SIMULATED_DISK_H
#define GRADD_TESTS_C_SIMULATED_DISK_H

#include "platform/platform.h"

/* The platform with this disk's files. Everything that it does to them is recorded. */
extern const gradd_platform_t simulated_disk;

typedef struct disk_record_s disk_record_t;

/* An empty disk. */
void disk_format(void);
/* Barriers for which this is true do nothing, in spite of what they say; NULL = there are none.
 * `number` counts them from 0. */
void disk_forget(bool (*is_forgotten)(int number));
/* The barrier of that number fails, once; -1 = none does. What was written before it is not kept.
 */
void disk_fail(int number);
/* Operations from that number on fail and do nothing: the process is dead; -1 = it is not. */
void disk_kill(int operation);
/* Operations so far. */
int disk_operations(void);
/* What the disk has done until now; the disk is empty then. To be freed with disk_record_free. */
disk_record_t *disk_take_record(void);
void disk_record_free(disk_record_t *record);
/* The disk after a loss of power in operation n of a record, which may be torn; n = their number:
 * after all of them. `draw` 0: nothing is there that was not kept; 1: everything; from 2 on some of
 * it, others for others. */
void disk_lose_power(const disk_record_t *record, int n, unsigned draw);

#endif
