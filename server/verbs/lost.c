/* See lost.h. */
#include "server/verbs/lost.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void lost_read(lost_plans_t *lost, const rundir_t *dir) {
    lost->dir = dir;
    lost->n = 0;
    const int fd = rundir_open(dir->folder, RUNDIR_LOST, O_RDONLY);
    if (fd < 0) return;
    const ssize_t bytes = read(fd, lost->plans, sizeof lost->plans);
    close(fd);
    if (bytes > 0) lost->n = (int)((size_t)bytes / sizeof lost->plans[0]);
}

/* Without room on the disk, the next daemon does not know. */
static void keep(lost_plans_t *lost) {
    if (!lost->dir) return;
    const int fd = rundir_open(lost->dir->folder, RUNDIR_LOST, O_WRONLY | O_CREAT | O_TRUNC);
    if (fd < 0) return;
    const size_t bytes = (size_t)lost->n * sizeof lost->plans[0];
    const bool is_written = write(fd, lost->plans, bytes) == (ssize_t)bytes;
    if (!is_written && ftruncate(fd, 0) != 0) lost->dir = NULL; /* not even an empty one */
    close(fd);
}

/* Its place, or n. */
static int find(const lost_plans_t *lost, const uint8_t *key, bool backward) {
    int i = 0;
    while (i < lost->n && (lost->plans[i].backward != backward ||
                           memcmp(lost->plans[i].key, key, sizeof lost->plans[i].key) != 0))
        i++;
    return i;
}

gradd_status_t lost_check(const lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES]) {
    for (int backward = 0; backward < 2; backward++) {
        const int i = find(lost, key, backward);
        if (i < lost->n && lost->plans[i].times >= LOST_TIMES)
            return GRADD_FAIL(UNSUPPORTED,
                              "graph.plan: refused, because the device was lost %u times in a %s "
                              "of this plan, or the process has crashed; `gradd stop` forgets "
                              "that, and daemon.log has the reason (device_lost, worker_lost)",
                              lost->plans[i].times, backward ? "backward" : "forward");
    }
    return GRADD_OK;
}

static void take_out(lost_plans_t *lost, int i) {
    lost->n--;
    memmove(&lost->plans[i], &lost->plans[i + 1], (size_t)(lost->n - i) * sizeof lost->plans[0]);
}

void lost_note(lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES], bool backward) {
    int i = find(lost, key, backward);
    if (i == LOST_MOST) {
        take_out(lost, 0);
        i = lost->n;
    }
    lost_plan_t *plan = &lost->plans[i];
    if (i == lost->n) {
        *plan = (lost_plan_t){.backward = backward};
        memcpy(plan->key, key, sizeof plan->key);
        lost->n++;
    }
    plan->times++;
    keep(lost);
}

void lost_ran(lost_plans_t *lost, const uint8_t key[GRADD_SHA256_BYTES], bool backward) {
    const int i = find(lost, key, backward);
    if (i == lost->n) return;
    take_out(lost, i);
    keep(lost);
}
