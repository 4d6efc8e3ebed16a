/* Memory of the device: blocks that are closed to the process while no stream works. See sim.h. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/sim/internal.h"

#define PAGE ((size_t)4096)

typedef struct sim_block_s {
    struct sim_block_s *next;
    char *at;
    size_t bytes, room; /* room: whole pages, of own blocks with a closed one behind the end */
    bool own;
} sim_block_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sim_block_t *blocks;
static size_t taken;
static int working; /* streams */

static size_t pages(size_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static void protect(const sim_block_t *b, bool open) {
    mprotect(b->at, pages(b->bytes), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static bool add(char *at, size_t bytes, size_t room, bool own) {
    sim_block_t *b = malloc(sizeof *b);
    if (!b) return false;
    *b = (sim_block_t){NULL, at, bytes, room, own};
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    if (own) taken += bytes;
    protect(b, working > 0);
    pthread_mutex_unlock(&lock);
    return true;
}

/* Takes the block that begins there out of the list. */
static sim_block_t *take_out(const void *at, bool own) {
    sim_block_t **link = &blocks;
    pthread_mutex_lock(&lock);
    while (*link && ((*link)->at != at || (*link)->own != own))
        link = &(*link)->next;
    sim_block_t *b = *link;
    if (b) *link = b->next;
    if (b && own) taken -= b->bytes;
    pthread_mutex_unlock(&lock);
    return b;
}

void *sim_memory_take(size_t bytes) {
    const size_t room = pages(bytes) + PAGE;
    char *at = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return NULL;
    mprotect(at, pages(bytes), PROT_READ | PROT_WRITE);
    memset(at, 0xff, bytes);
    if (add(at, bytes, room, true)) return at;
    munmap(at, room);
    return NULL;
}

bool sim_memory_drop(void *at) {
    sim_block_t *b = take_out(at, true);
    if (b) munmap(b->at, b->room);
    free(b);
    return b;
}

bool sim_memory_add(void *at, size_t bytes) {
    if ((uintptr_t)at % PAGE || sim_memory_has(at)) return false;
    return add(at, bytes, pages(bytes), false);
}

bool sim_memory_remove(void *at) {
    sim_block_t *b = take_out(at, false);
    if (b) protect(b, true);
    free(b);
    return b;
}

bool sim_memory_has(const void *at) {
    pthread_mutex_lock(&lock);
    const sim_block_t *b = blocks;
    while (b && ((const char *)at < b->at || (const char *)at >= b->at + b->room))
        b = b->next;
    pthread_mutex_unlock(&lock);
    return b;
}

static void change(int by) {
    pthread_mutex_lock(&lock);
    const bool was_open = working > 0;
    working += by;
    for (const sim_block_t *b = blocks; b && was_open != (working > 0); b = b->next)
        protect(b, working > 0);
    pthread_mutex_unlock(&lock);
}

void sim_memory_open(void) {
    change(1);
}

void sim_memory_close(void) {
    change(-1);
}

size_t sim_bytes(void) {
    pthread_mutex_lock(&lock);
    const size_t bytes = taken;
    pthread_mutex_unlock(&lock);
    return bytes;
}
