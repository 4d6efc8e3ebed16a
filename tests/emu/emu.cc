/* Fibers, barriers and shared memory of the emulation. See emu.h. */
#include "tests/emu/emu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tests/emu/order.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

enum { MAX_SHARED = 64, MAX_COPIES = 64 };
static const int MAX_THREADS = 1024, STACK = 64 << 10;
enum state_t { READY, AT_BLOCK, AT_WARP, DONE };

#if defined(__x86_64__)
typedef void *context_t; /* the stack pointer: all else lies on the stack */
#else
typedef ucontext_t context_t;
#endif

struct emu_copy_t {
    void *to;
    const void *from;
};

struct fiber_t {
    context_t context;
    state_t state;
    unsigned turns; /* exchanges so far */
    dim3 at;
    void *fake; /* a sanitizer's */
    emu_copy_t copy[MAX_COPIES];
    int n_copies;
};

struct warp_t {
    uint64_t slot[2][WARP]; /* one is read while the next is written */
    told_t told[2][WARP];
    int arrived, size;
    const char *at;
};

struct region_t {
    const void *tag;
    size_t from, bytes;
};

static struct {
    fiber_t fiber[MAX_THREADS];
    warp_t warp[MAX_THREADS / WARP];
    int order[MAX_THREADS];
    char *stacks;
    context_t host;
    void *host_fake;
    const void *host_stack;
    size_t host_bytes;
    int n, alive, arrived;
    const char *at, *kernel;
    void (*run)(void *);
    void *argument;
    region_t region[MAX_SHARED];
    int regions;
    size_t used, more;
    uint64_t random;
} b;

alignas(128) static char memory[SHARED_LIMIT], more_memory[SIM_SHARED];
static long order_set = -1, switches;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* queues have threads */

emu_place_t here;

[[noreturn]] static void stop(const char *what, const char *at) {
    fflush(stdout);
    fprintf(stderr, "emulated GPU: %s at %s, kernel %s, block %u,%u,%u, thread %d\n", what,
            at ? at : "?", b.kernel, here.block.x, here.block.y, here.block.z, here.index);
    abort();
}

/* ---- fibers ---- */

static char *stack_of(int i) {
    return b.stacks + (size_t)i * (size_t)STACK;
}

#if defined(__x86_64__)
asm(".text\n"
    ".local emu_switch\n"
    ".type emu_switch,@function\n"
    "emu_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp,(%rdi)\n movq (%rsi),%rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");
extern "C" void emu_switch(context_t *from, context_t *to);

static void make(int i, void (*entry)(void)) {
    /* Tops of stacks differ, or all of them would meet in one set of the cache. */
    char *top = stack_of(i) + STACK - 256 - i % 61 * 64;
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)63);
    memset(sp, 0, 64);
    sp[6] = (void *)entry;
    b.fiber[i].context = sp;
}
#else
static void emu_switch(context_t *from, context_t *to) {
    swapcontext(from, to);
}

static void make(int i, void (*entry)(void)) {
    context_t *c = &b.fiber[i].context;
    getcontext(c);
    c->uc_stack.ss_sp = stack_of(i);
    c->uc_stack.ss_size = STACK;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
}
#endif

static void arrive(void **fake) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake ? *fake : nullptr, &b.host_stack, &b.host_bytes);
#else
    (void)fake;
#endif
}

/* Back to the host, until it is this thread's turn again. */
static void leave(bool for_good) {
    fiber_t *f = &b.fiber[here.index];
    switches++;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &f->fake, b.host_stack, b.host_bytes);
#else
    (void)for_good;
#endif
    emu_switch(&f->context, &b.host);
    arrive(&f->fake);
}

static void go_on(int i) {
    here.index = i;
    here.thread = b.fiber[i].at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b.host_fake, stack_of(i), STACK);
#endif
    emu_switch(&b.host, &b.fiber[i].context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b.host_fake, nullptr, nullptr);
#endif
}

static void entry() {
    arrive(nullptr);
    b.run(b.argument);
    b.fiber[here.index].state = DONE;
    b.alive--;
    if (b.arrived) stop("a thread ends while others wait for it at a barrier", b.at);
    warp_t *w = &b.warp[here.index / WARP];
    if (w->arrived) stop("a lane ends while others wait for it", w->at);
    leave(true);
    abort();
}

/* ---- what kernels call ---- */

void wait_block(const char *at) {
    if (b.arrived && strcmp(b.at, at)) stop("threads wait at another barrier", at);
    if (b.alive != b.n) stop("a barrier behind which some threads have ended", at);
    b.at = at;
    if (++b.arrived == b.n) {
        for (int i = 0; i < b.n; i++)
            b.fiber[i].state = READY;
        b.arrived = 0;
        return;
    }
    b.fiber[here.index].state = AT_BLOCK;
    leave(false);
}

void wait_warp(const char *at) {
    warp_t *w = &b.warp[here.index / WARP];
    if (w->arrived && strcmp(w->at, at)) stop("lanes wait at another place", at);
    w->at = at;
    if (++w->arrived == w->size) {
        const int first = here.index / WARP * WARP;
        for (int i = first; i < first + w->size; i++)
            if (b.fiber[i].state == AT_WARP) b.fiber[i].state = READY;
        w->arrived = 0;
        return;
    }
    b.fiber[here.index].state = AT_WARP;
    leave(false);
}

uint64_t exchange(uint64_t bits, int lane, const char *at) {
    warp_t *w = &b.warp[here.index / WARP];
    uint64_t *slot = w->slot[b.fiber[here.index].turns++ & 1];
    slot[here.index % WARP] = bits;
    wait_warp(at);
    if (lane < 0 || lane >= w->size) stop("a lane that is not there is read", at);
    return slot[lane];
}

const told_t *tell(const void *mine, size_t bytes, const char *at) {
    warp_t *w = &b.warp[here.index / WARP];
    told_t *told = w->told[b.fiber[here.index].turns++ & 1];
    if (bytes > sizeof told->bytes || w->size != WARP) stop("more than lanes can tell", at);
    memcpy(told[here.index % WARP].bytes, mine, bytes);
    wait_warp(at);
    return told;
}

void copy_later(void *to, const void *from, const char *at) {
    fiber_t *f = &b.fiber[here.index];
    if (f->n_copies == MAX_COPIES) stop("too many copies without a wait", at);
    memset(to, 0xff, 16);
    f->copy[f->n_copies++] = {to, from};
}

void wait_copies() {
    fiber_t *f = &b.fiber[here.index];
    for (int i = 0; i < f->n_copies; i++) {
        if (f->copy[i].from)
            memcpy(f->copy[i].to, f->copy[i].from, 16);
        else
            memset(f->copy[i].to, 0, 16);
    }
    f->n_copies = 0;
}

uint32_t vote(bool mine, const char *at) {
    warp_t *w = &b.warp[here.index / WARP];
    uint64_t *slot = w->slot[b.fiber[here.index].turns++ & 1];
    uint32_t all = 0;
    slot[here.index % WARP] = mine;
    wait_warp(at);
    for (int i = 0; i < w->size; i++)
        all |= (uint32_t)(slot[i] != 0) << i;
    return all;
}

void *shared(const void *tag, size_t bytes, const char *at) {
    for (int i = 0; i < b.regions; i++)
        if (b.region[i].tag == tag) return memory + b.region[i].from;
    const size_t room = (bytes + 127) / 128 * 128;
    if (b.regions == MAX_SHARED || b.used + room > SHARED_LIMIT ||
        b.used + room + b.more > (size_t)sim_shared_most())
        stop("more shared memory than a block has", at);
    b.region[b.regions++] = {tag, b.used, bytes};
    memset(memory + b.used, 0xff, room);
    b.used += room;
    return memory + b.used - room;
}

void *shared_more() {
    return more_memory;
}

/* ---- blocks ---- */

static void draw_order(long order, int round) {
    for (int i = 0; i < b.n; i++)
        b.order[i] = order & 1 && order < 4 ? b.n - 1 - i : i;
    for (int i = b.n - 1; order > 3 && i > 0; i--) {
        b.random = b.random * 6364136223846793005u + 1442695040888963407u + (unsigned)round;
        const int k = (int)((b.random >> 33) % (unsigned)(i + 1)), kept = b.order[i];
        b.order[i] = b.order[k];
        b.order[k] = kept;
    }
}

static bool turn(int i) {
    if (b.fiber[i].state != READY) return false;
    go_on(i);
    return true;
}

/* The warp as far as it gets: to a barrier of the block, or to its end. */
static bool turn_warp(int first) {
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        for (int i = first; i < first + WARP && i < b.n; i++)
            more |= turn(i);
        any |= more;
    }
    return any;
}

static void start_block(dim3 threads) {
    b.alive = b.n;
    b.arrived = b.regions = 0;
    b.used = 0;
    memset(more_memory, 0xff, b.more);
    memset(b.warp, 0, sizeof b.warp);
    for (int i = 0; i < b.n; i++) {
        b.warp[i / WARP].size++;
        b.fiber[i].state = READY;
        b.fiber[i].turns = 0;
        b.fiber[i].n_copies = 0;
        b.fiber[i].at = dim3((unsigned)i % threads.x, (unsigned)i / threads.x % threads.y,
                             (unsigned)i / threads.x / threads.y);
        make(i, entry);
    }
}

static void run_block(dim3 threads, long order) {
    const bool by_warps = order < 4 ? order > 1 : order & 1;
    start_block(threads);
    for (int round = 0; b.alive; round++) {
        bool any = false;
        draw_order(order, round);
        for (int k = 0; k < b.n; k++) {
            const int i = b.order[k];
            if (!by_warps)
                any |= turn(i);
            else if (i % WARP == 0)
                any |= turn_warp(i);
        }
        if (!any) stop("no thread can go on", b.at);
    }
}

static long order_now() {
    const char *text = getenv("GRADD_EMU_ORDER");
    return order_set >= 0 ? order_set : text ? atol(text) : 0;
}

/* ---- launches ---- */

void launch(dim3 blocks, dim3 threads, size_t more, void (*run)(void *), void *argument,
            const char *kernel) {
    const long order = order_now();
    pthread_mutex_lock(&one_at_a_time);
    b.kernel = kernel;
    b.n = (int)(threads.x * threads.y * threads.z);
    if (b.n < 1 || b.n > MAX_THREADS || threads.z > 64) stop("a block of that size", "launch");
    if (!blocks.x || !blocks.y || !blocks.z || blocks.y > 65535 || blocks.z > 65535)
        stop("a grid of that size", "launch");
    if (more > sizeof more_memory) stop("more shared memory than a block has", "launch");
    if (!b.stacks) {
        const size_t bytes = (size_t)MAX_THREADS * (size_t)STACK;
        b.stacks = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (b.stacks == MAP_FAILED) stop("no memory for stacks", "launch");
    }
    b.run = run;
    b.more = more;
    b.argument = argument;
    b.random = (uint64_t)order + 1;
    here.threads = threads;
    here.blocks = blocks;
    for (unsigned z = 0; z < blocks.z; z++)
        for (unsigned y = 0; y < blocks.y; y++)
            for (unsigned x = 0; x < blocks.x; x++) {
                here.block = dim3(x, y, z);
                run_block(threads, order);
            }
    pthread_mutex_unlock(&one_at_a_time);
}

} // namespace emu

extern "C" void emu_set_order(long order) {
    emu::order_set = order;
}

extern "C" long emu_switches(void) {
    const long n = emu::switches;
    emu::switches = 0;
    return n;
}
