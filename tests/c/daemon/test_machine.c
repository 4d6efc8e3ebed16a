/* Tests of server/host/machine and of the admission of memory, on made-up files of /proc and
 * /sys. */
#include "server/host/machine.h"

#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/verbs/worker.h"
#include "tests/test.h"

#define GIB ((int64_t)1 << 30)

static char root[64];

/* Writes a file below `root`, with its folders. */
static void put(const char *name, const char *format, ...) {
    char path[512];
    va_list args;
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fclose(file);
}

/* A machine of 512 GiB with 300 available and 4 of swap. */
static void make_machine(const char *groups) {
    strcpy(root, "/tmp/gradd-machine-XXXXXX");
    CHECK(mkdtemp(root) != NULL);
    put("proc/meminfo",
        "MemTotal:       %lld kB\nMemFree:        1 kB\nMemAvailable:   %lld kB\n"
        "SwapTotal:      9 kB\nSwapFree:       %lld kB\nHugePages_Total:       0\n",
        512LL << 20, 300LL << 20, 4LL << 20);
    put("proc/self/cgroup", "%s", groups);
}

static void remove_machine(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK_EQ_INT(system(command), 0);
}

TEST(without_groups_the_machine_is_all_there_is) {
    make_machine("0::/\n");
    CHECK_EQ_INT(machine_memory(root), 512 * GIB);
    CHECK_EQ_INT(machine_memory_left(root), 304 * GIB);
    remove_machine();
    CHECK_EQ_INT(machine_memory("/nowhere"), INT64_MAX);
    CHECK_EQ_INT(machine_memory_left("/nowhere"), INT64_MAX);
    CHECK(machine_memory("") > 0 && machine_memory_left("") > 0);
    CHECK(machine_memory_left("") <= 4 * machine_memory(""));
}

/* A limit holds for all groups below it; one without limit has none of its own. */
TEST(the_lowest_limit_of_all_ancestors_counts) {
    make_machine("0::/user.slice/app.scope\n");
    put("sys/fs/cgroup/user.slice/app.scope/memory.max", "max\n");
    put("sys/fs/cgroup/user.slice/memory.max", "%lld\n", (long long)(16 * GIB));
    put("sys/fs/cgroup/user.slice/memory.current", "%lld\n", (long long)(12 * GIB));
    put("sys/fs/cgroup/user.slice/memory.swap.max", "0\n");
    put("sys/fs/cgroup/user.slice/memory.stat",
        "anon 1\nfile %lld\ninactive_anon 5\ninactive_file %lld\nactive_file %lld\n",
        (long long)(5 * GIB), (long long)GIB, (long long)(2 * GIB));
    CHECK_EQ_INT(machine_memory(root), 16 * GIB);
    CHECK_EQ_INT(machine_memory_left(root), 7 * GIB); /* 4 free, 3 of page cache */
    put("sys/fs/cgroup/user.slice/memory.swap.max", "max\n");
    CHECK_EQ_INT(machine_memory_left(root), 11 * GIB); /* the machine's 4 of swap */
    put("sys/fs/cgroup/user.slice/app.scope/memory.max", "%lld\n", (long long)(2 * GIB));
    put("sys/fs/cgroup/user.slice/app.scope/memory.current", "%lld\n", (long long)(3 * GIB));
    put("sys/fs/cgroup/user.slice/app.scope/memory.swap.max", "0\n");
    CHECK_EQ_INT(machine_memory(root), 2 * GIB);
    CHECK_EQ_INT(machine_memory_left(root), 0);
    remove_machine();
}

TEST(groups_of_version_1) {
    make_machine("5:devices:/\n4:cpu,memory:/docker/1234\n1:name=systemd:/x\n0::/\n");
    /* in a container the path is the host's, and the files lie at the root */
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "%lld\n", (long long)(8 * GIB));
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "%lld\n", (long long)(6 * GIB));
    put("sys/fs/cgroup/memory/memory.stat", "total_inactive_file %lld\n", (long long)GIB);
    CHECK_EQ_INT(machine_memory(root), 8 * GIB);
    CHECK_EQ_INT(machine_memory_left(root), 3 * GIB);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    CHECK_EQ_INT(machine_memory(root), 512 * GIB);
    CHECK_EQ_INT(machine_memory_left(root), 304 * GIB);
    remove_machine();
}

/* ---- admission ---- */

static worker_t open_worker(int64_t limit) {
    const gradd_device_options_t o = {.threads = 1, .memory_limit = limit};
    worker_t worker = {.root = root};
    CHECK_OK(worker_open_device(&worker, &o));
    return worker;
}

TEST(runs_are_admitted_up_to_what_is_left) {
    make_machine("0::/job\n");
    put("sys/fs/cgroup/job/memory.max", "%lld\n", (long long)(16 * GIB));
    put("sys/fs/cgroup/job/memory.current", "%lld\n", (long long)(10 * GIB));
    put("sys/fs/cgroup/job/memory.swap.max", "0\n");
    worker_t worker = open_worker(14 * GIB);
    CHECK_OK(worker_admit(&worker, 6 * GIB));
    CHECK_STATUS(GRADD_E_NOMEM, worker_admit(&worker, 7 * GIB));
    CHECK_ERROR_HAS("needs 7168 MiB of activations; the machine, or the control group of the "
                    "daemon, has 6144 MiB left");
    gradd_device_close(worker.device);
    remove_machine();
}

/* Small pieces are admitted without looking, until together they are worth it. */
TEST(small_pieces_add_up) {
    make_machine("0::/job\n");
    put("sys/fs/cgroup/job/memory.max", "%lld\n", (long long)GIB);
    put("sys/fs/cgroup/job/memory.current", "%lld\n", (long long)GIB);
    put("sys/fs/cgroup/job/memory.swap.max", "0\n");
    worker_t worker = open_worker(14 * GIB);
    int n = 0;
    while (n < 100 && worker_admit(&worker, 1 << 20) == GRADD_OK)
        n++;
    CHECK_EQ_INT(n, 31);
    CHECK_STATUS(GRADD_E_NOMEM, worker_admit(&worker, 1 << 20)); /* and it stays so */
    gradd_device_close(worker.device);
    remove_machine();
}

TEST(the_default_limit_is_a_share_of_what_there_is) {
    worker_t worker = open_worker(5 << 20);
    CHECK_EQ_INT(gradd_device_info(worker.device)->memory_limit, 5 << 20);
    gradd_device_close(worker.device);
    make_machine("0::/job\n");
    put("sys/fs/cgroup/job/memory.max", "%lld\n", (long long)(10 * GIB));
    worker = open_worker(0);
    CHECK_EQ_INT(gradd_device_info(worker.device)->memory_limit, 9 * GIB);
    gradd_device_close(worker.device);
    remove_machine();
}

/* ---- processors ---- */

TEST(an_inherited_mask_can_be_left) {
    cpu_set_t one;
    machine_unpin();
    int all = machine_processors();
    if (all < 2) test_skip("one processor");
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK_EQ_INT(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ_INT(machine_processors(), 1);
    machine_unpin();
    CHECK_EQ_INT(machine_processors(), all);
    CHECK_EQ_INT(machine_threads(0), all);
    CHECK_EQ_INT(machine_threads(3), 3);
    CHECK_EQ_INT(machine_threads(INT64_MAX), 1024);
}
