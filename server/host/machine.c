/* Memory and processors. See machine.h.
 *
 * Control groups are a path in /proc/self/cgroup; every ancestor may have a limit of its own. In a
 * container the path may be that of the host, while the files of our group lie at the root: walking
 * up from a path that does not exist ends there.
 */
#include "server/host/machine.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/gradd.h"

#define MAX_PROCESSORS 8192 /* the most that Linux is built for */
#define PATH_BYTES     4096

/* ---- files ---- */

/* The number in a file of one number; `otherwise` for "max" and where there is no such file. */
static int64_t read_number(const char *folder, const char *name, int64_t otherwise) {
    char path[PATH_BYTES];
    uint64_t value;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return otherwise;
    FILE *file = fopen(path, "re");
    if (!file) return otherwise;
    int n = fscanf(file, "%" SCNu64, &value);
    fclose(file);
    if (n != 1) return otherwise;
    return value < INT64_MAX ? (int64_t)value : INT64_MAX;
}

/* The sum of the numbers behind these names ("MemAvailable:") in a file of one pair a line; -1 when
 * none is there. */
static int64_t read_pairs(const char *folder, const char *name, const char *const keys[2]) {
    char path[PATH_BYTES], line[256], key[128];
    int64_t sum = -1, value;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return -1;
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %" SCNd64, key, &value) == 2 &&
            (!strcmp(key, keys[0]) || !strcmp(key, keys[1])))
            sum = (sum < 0 ? 0 : sum) + value;
    fclose(file);
    return sum;
}

/* Bytes in /proc/meminfo, which counts in KiB; -1 when they are not there. */
static int64_t read_meminfo(const char *root, const char *key) {
    char folder[PATH_BYTES];
    snprintf(folder, sizeof folder, "%s/proc", root);
    int64_t kib = read_pairs(folder, "meminfo", (const char *const[2]){key, key});
    return kib < 0 ? -1 : kib << 10;
}

/* ---- control groups ---- */

/* The names of both versions. */
typedef struct group_kind_s {
    const char *mount, *limit, *used, *cache[2], *swap_limit, *swap_used;
} group_kind_t;

static const group_kind_t version_2 = {
    "/sys/fs/cgroup",  "memory.max",         "memory.current", {"inactive_file", "active_file"},
    "memory.swap.max", "memory.swap.current"
};
static const group_kind_t version_1 = {
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    {"total_inactive_file", "total_active_file"},
    NULL,
    NULL
};

static int64_t at_most(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t limit_of(const group_kind_t *kind, const char *folder, int64_t swap) {
    (void)swap;
    return read_number(folder, kind->limit, INT64_MAX);
}

static int64_t left_in(const group_kind_t *kind, const char *folder, int64_t swap) {
    int64_t limit = read_number(folder, kind->limit, INT64_MAX);
    if (limit == INT64_MAX) return INT64_MAX;
    int64_t left = limit - read_number(folder, kind->used, 0);
    int64_t cache = read_pairs(folder, "memory.stat", kind->cache);
    if (cache > 0) left += cache;
    if (kind->swap_limit) {
        int64_t own = read_number(folder, kind->swap_limit, INT64_MAX);
        left += at_most(swap, own - at_most(own, read_number(folder, kind->swap_used, 0)));
    }
    return left > 0 ? left : 0;
}

typedef int64_t (*measure_t)(const group_kind_t *kind, const char *folder, int64_t swap);

/* The lowest of this group and all above it. `group` is cut. */
static int64_t lowest(const char *root, const group_kind_t *kind, char *group, measure_t measure,
                      int64_t swap) {
    char folder[PATH_BYTES];
    int64_t low = INT64_MAX;
    for (;;) {
        int n = snprintf(folder, sizeof folder, "%s%s%s", root, kind->mount, group);
        if (n < (int)sizeof folder) low = at_most(low, measure(kind, folder, swap));
        char *slash = strrchr(group, '/');
        if (!slash) return low;
        *slash = 0;
    }
}

/* Of a line "4:memory:/a/b" or "0::/a/b"; NULL when it says nothing about memory. */
static const group_kind_t *kind_of(const char *line, const char **out_group) {
    const char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
    if (!group) return NULL;
    *out_group = group + 1;
    if (group == names + 1) return &version_2;
    char list[256];
    snprintf(list, sizeof list, ",%.*s,", (int)(group - names - 1), names + 1);
    return strstr(list, ",memory,") ? &version_1 : NULL;
}

static int64_t over_groups(const char *root, measure_t measure, int64_t swap) {
    char path[PATH_BYTES], line[PATH_BYTES];
    int64_t low = INT64_MAX;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    if (!file) return low;
    while (fgets(line, sizeof line, file)) {
        const char *group;
        line[strcspn(line, "\n")] = 0;
        const group_kind_t *kind = kind_of(line, &group);
        if (kind) low = at_most(low, lowest(root, kind, (char *)group, measure, swap));
    }
    fclose(file);
    return low;
}

/* ---- memory ---- */

int64_t machine_memory(const char *root) {
    int64_t total = read_meminfo(root, "MemTotal:");
    return at_most(total < 0 ? INT64_MAX : total, over_groups(root, limit_of, 0));
}

int64_t machine_memory_left(const char *root) {
    int64_t available = read_meminfo(root, "MemAvailable:");
    int64_t swap = read_meminfo(root, "SwapFree:");
    if (swap < 0) swap = 0;
    return at_most(available < 0 ? INT64_MAX : available + swap, over_groups(root, left_in, swap));
}

/* ---- processors ---- */

int machine_processors(void) {
    size_t bytes = CPU_ALLOC_SIZE(MAX_PROCESSORS);
    cpu_set_t *set = CPU_ALLOC(MAX_PROCESSORS);
    int n = 0;
    if (set && sched_getaffinity(0, bytes, set) == 0) n = CPU_COUNT_S(bytes, set);
    if (set) CPU_FREE(set);
    return n > 0 ? n : 1;
}

void machine_unpin(void) {
    size_t bytes = CPU_ALLOC_SIZE(MAX_PROCESSORS);
    cpu_set_t *set = CPU_ALLOC(MAX_PROCESSORS);
    if (!set) return;
    memset(set, 0xff, bytes); /* the kernel takes those that exist and are allowed */
    sched_setaffinity(0, bytes, set);
    CPU_FREE(set);
}

int machine_threads(int64_t wanted) {
    int64_t threads = wanted > 0 ? wanted : machine_processors();
    return threads < GRADD_MAX_THREADS ? (int)threads : GRADD_MAX_THREADS;
}
