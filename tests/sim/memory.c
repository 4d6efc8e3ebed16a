/* Memory of the device: blocks that are closed to the process while no stream works. See sim.h. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/sim/internal.h"

typedef struct sim_entry_s {
    struct sim_entry_s *next;
    sim_block_t block;
} sim_entry_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sim_entry_t *entries;
static size_t taken, mapped, in_use[SIM_DEVICES];
static int working; /* streams */
static bool is_open;

size_t sim_pages(size_t bytes) {
    return (bytes + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
}

static void protect(const sim_block_t *b, bool open) {
    mprotect(b->at, sim_pages(b->bytes), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static const sim_entry_t *entry_of(const void *at) {
    const sim_entry_t *e = entries;
    while (e && ((const char *)at < e->block.at || (const char *)at >= e->block.at + e->block.room))
        e = e->next;
    return e;
}

bool sim_memory_find(const void *at, sim_block_t *out) {
    pthread_mutex_lock(&lock);
    const sim_entry_t *e = entry_of(at);
    if (e && out) *out = e->block;
    pthread_mutex_unlock(&lock);
    return e;
}

/* `by` is 1 or -1. */
static void account(const sim_block_t *b, int by) {
    const size_t bytes = by > 0 ? b->bytes : -b->bytes;
    if (b->kind == SIM_TAKEN) taken += bytes;
    if (b->kind == SIM_MAPPED || b->kind == SIM_OPENED) mapped += bytes;
    if (b->kind == SIM_TAKEN || b->kind == SIM_MAPPED) in_use[b->device] += bytes;
}

bool sim_memory_add(const sim_block_t *block) {
    sim_entry_t *e = malloc(sizeof *e);
    if (!e) return false;
    pthread_mutex_lock(&lock);
    const bool known = entry_of(block->at);
    *e = (sim_entry_t){entries, *block};
    if (!known) {
        entries = e;
        account(block, 1);
        protect(block, is_open);
    }
    pthread_mutex_unlock(&lock);
    if (known) free(e);
    return !known;
}

bool sim_memory_remove(const void *at, sim_kind_t kind, sim_block_t *out) {
    sim_entry_t **link = &entries;
    pthread_mutex_lock(&lock);
    while (*link && ((*link)->block.at != at || (*link)->block.kind != kind))
        link = &(*link)->next;
    sim_entry_t *e = *link;
    if (e) {
        *link = e->next;
        *out = e->block;
        account(&e->block, -1);
    }
    pthread_mutex_unlock(&lock);
    free(e);
    return e;
}

size_t sim_memory_limit(void) {
    const char *text = getenv("GRADD_SIM_MEMORY_MB");
    return (text ? strtoul(text, NULL, 10) : 4096) << 20;
}

/* With a closed page behind the end, and in a file one for sim_importers_t. */
void *sim_memory_take(size_t bytes, bool shared) {
    const size_t size = sim_pages(bytes);
    const int device = sim_device();
    if (device < 0 || sim_bytes_of(device) + bytes > sim_memory_limit()) return NULL;
    const int fd = shared ? sim_file("sim-block", size + SIM_PAGE) : -1;
    if (shared && fd < 0) return NULL;
    char *at = mmap(NULL, size + SIM_PAGE, PROT_READ | PROT_WRITE,
                    shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, fd, 0);
    if (at != MAP_FAILED) {
        memset(at, 0xff, bytes);
        mprotect(at + size, SIM_PAGE, PROT_NONE);
        if (sim_memory_add(&(sim_block_t){at, bytes, size + SIM_PAGE, SIM_TAKEN, fd, device}))
            return at;
        munmap(at, size + SIM_PAGE);
    }
    if (fd >= 0) close(fd);
    return NULL;
}

bool sim_memory_drop(void *at) {
    sim_block_t b;
    if (!sim_memory_remove(at, SIM_TAKEN, &b)) return false;
    munmap(b.at, b.room);
    if (b.fd >= 0) close(b.fd);
    return true;
}

/* Of so many times that the streams become idle, one closes the memory. */
static unsigned closing(void) {
    const char *text = getenv("GRADD_SIM_CLOSE");
    return text && atoi(text) > 0 ? (unsigned)atoi(text) : 1;
}

static void change(int by) {
    static unsigned idle, one_in;
    pthread_mutex_lock(&lock);
    working += by;
    if (!one_in) one_in = closing();
    if (working ? !is_open : ++idle % one_in == 0) {
        is_open = working > 0;
        for (const sim_entry_t *e = entries; e; e = e->next)
            protect(&e->block, is_open);
    }
    pthread_mutex_unlock(&lock);
}

void sim_memory_open(void) {
    change(1);
}

void sim_memory_close(void) {
    change(-1);
}

size_t sim_bytes_of(int number) {
    pthread_mutex_lock(&lock);
    const size_t bytes = number < 0 ? 0 : in_use[number];
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t sim_bytes_mapped(void) {
    pthread_mutex_lock(&lock);
    const size_t bytes = mapped;
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t sim_bytes(void) {
    pthread_mutex_lock(&lock);
    const size_t bytes = taken;
    pthread_mutex_unlock(&lock);
    return bytes;
}
