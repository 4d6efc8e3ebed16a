/* Runs a fuzz target without libFuzzer: for compilers that lack it, and for the short run of
 * `make test`.
 *
 *     fuzz_wire -runs=20000 [-seed=1]
 *
 * The corpus is what the target itself writes as seeds, and grows by whatever inputs are drawn:
 * there is no coverage to guide it. Each execution mutates one member a few times. Everything
 * follows from the seed. A finding ends the process by signal; its input lies beside the program,
 * with the suffix .crash.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/fuzz/target.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max_n);
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max_n,
                                                     unsigned seed);

enum { MAX_BYTES = 16384, MAX_MEMBERS = 4096 };

static struct member_s {
    uint8_t *data;
    size_t n;
} corpus[MAX_MEMBERS];
static int n_members;
static uint64_t state = 1;
static uint8_t input[MAX_BYTES]; /* what runs now: written out by the signal handler */
static size_t input_bytes;
static char crash_path[4096];

static size_t draw(size_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return n ? (size_t)(state >> 33) % n : 0;
}

static void remember(const uint8_t *data, size_t n) {
    int slot = n_members < MAX_MEMBERS ? n_members++ : (int)draw(MAX_MEMBERS);
    uint8_t *copy = malloc(n + 1);
    if (!copy) return;
    memcpy(copy, data, n);
    free(corpus[slot].data);
    corpus[slot] = (struct member_s){copy, n};
}

static size_t cut(uint8_t *data, size_t n) {
    size_t at = draw(n), length = 1 + draw(n - at > 16 ? 16 : n - at);
    if (length > n - at) length = n - at;
    memmove(data + at, data + at + length, n - at - length);
    return n - length;
}

static size_t insert(uint8_t *data, size_t n, size_t max_n) {
    size_t at = draw(n + 1), length = 1 + draw(8);
    if (length > max_n - n) return n;
    memmove(data + at + length, data + at, n - at);
    for (size_t i = 0; i < length; i++)
        data[at + i] = (uint8_t)draw(256);
    return n + length;
}

/* A piece of another member over or into this one. */
static size_t graft(uint8_t *data, size_t n, size_t max_n) {
    const struct member_s *other = &corpus[draw((size_t)n_members)];
    size_t from = draw(other->n), length = draw(other->n - from), at = draw(n + 1);
    if (length > max_n - at) length = max_n - at;
    memcpy(data + at, other->data + from, length);
    return at + length > n ? at + length : n;
}

size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max_n) {
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, 0xfe, 0x40, 0x90, 0xc0, 0xdd};
    if (n == 0) return insert(data, n, max_n);
    switch (draw(7)) {
    case 0:
        data[draw(n)] ^= (uint8_t)(1u << draw(8));
        return n;
    case 1:
        data[draw(n)] = (uint8_t)draw(256);
        return n;
    case 2:
        data[draw(n)] = edges[draw(sizeof edges)];
        return n;
    case 3:
        data[draw(n)] += (uint8_t)(draw(2) ? 1 : 255);
        return n;
    case 4:
        return cut(data, n);
    case 5:
        return insert(data, n, max_n);
    default:
        return graft(data, n, max_n);
    }
}

static void on_signal(int number) {
    int fd = open(crash_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd >= 0 && write(fd, input, input_bytes) != (ssize_t)input_bytes) _exit(99);
    signal(number, SIG_DFL);
    raise(number);
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return;
    size_t n = fread(input, 1, sizeof input, file);
    fclose(file);
    remember(input, n);
}

/* The target writes its seeds in a process of its own, because it exits afterwards. */
static void load_seeds(int *argc, char ***argv) {
    char folder[] = "/tmp/gradd-fuzz-XXXXXX", path[128];
    int status = 0;
    if (!mkdtemp(folder)) return;
    pid_t child = fork();
    if (child == 0) {
        setenv("GRADD_FUZZ_SEEDS", folder, 1);
        LLVMFuzzerInitialize(argc, argv);
        _exit(1); /* it should have ended */
    }
    waitpid(child, &status, 0);
    static const char *const kinds[] = {"seed", "case"};
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < MAX_MEMBERS; i++) {
            snprintf(path, sizeof path, "%s/%s_%d", folder, kinds[kind], i);
            if (access(path, R_OK) != 0) break;
            load(path);
            unlink(path);
        }
    rmdir(folder);
}

/* A hang is a finding: 20 seconds of processor time, for a machine may stop or starve this process,
 * or ten minutes of those that wait. */
static void watch(void) {
    const struct itimerval most = {.it_value.tv_sec = 20};
    setitimer(ITIMER_PROF, &most, NULL);
    alarm(600);
}

static void execute(void) {
    const struct member_s *member = &corpus[draw((size_t)n_members)];
    input_bytes = member->n;
    memcpy(input, member->data, member->n);
    for (size_t k = 0, times = 1 + draw(4); k < times; k++)
        input_bytes =
            LLVMFuzzerCustomMutator
                ? LLVMFuzzerCustomMutator(input, input_bytes, MAX_BYTES, (unsigned)draw(1u << 30))
                : LLVMFuzzerMutate(input, input_bytes, MAX_BYTES);
    uint8_t *exact = malloc(input_bytes ? input_bytes : 1); /* so that a sanitizer sees its end */
    if (!exact) return;
    memcpy(exact, input, input_bytes);
    LLVMFuzzerTestOneInput(exact, input_bytes);
    free(exact);
    if (draw(64) == 0) remember(input, input_bytes);
}

int main(int argc, char **argv) {
    long runs = 20000;
    snprintf(crash_path, sizeof crash_path, "%s.crash", argv[0]);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-runs=", 6)) runs = atol(argv[i] + 6);
        if (!strncmp(argv[i], "-seed=", 6)) state = strtoull(argv[i] + 6, NULL, 10);
    }
    load_seeds(&argc, &argv);
    if (!n_members) {
        fprintf(stderr, "the target wrote no seeds\n");
        return 1;
    }
    int n_seeds = n_members;
    LLVMFuzzerInitialize(&argc, &argv);
    const int signals[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGALRM, SIGPROF};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++)
        signal(signals[i], on_signal);
    for (long k = 0; k < runs; k++) {
        if (k % 256 == 0) watch();
        execute();
    }
    printf("%ld executions from %d seeds, no finding\n", runs, n_seeds);
    for (int i = 0; i < n_members; i++)
        free(corpus[i].data);
    return 0;
}
