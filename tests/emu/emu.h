/* Runs CUDA C++ kernels on the host, for tests: what kernels/cuda/gpu.h asks of a compiler that is
 * not nvcc.
 *
 * Every CUDA thread is a fiber with a stack of its own; a block runs on the calling thread, one
 * after the other. A fiber goes on until a barrier or a warp's exchange. The emulation finds:
 *   - barriers and exchanges that some threads miss, or reach at another line: stops the process,
 *   - shared memory that is read before it is written: it is filled with ones (NaN, -1),
 *   - results that depend on the order of threads: emu_set_order chooses it,
 *   - bytes that the host reads before it has waited for their copy (tests/sim),
 *   - shared memory beyond what a block may have. A launch that asks for more than the device has
 * is refused, as by the driver (sim_takes_shared). It does not find: a weaker order of memory than
 * the host's, bank conflicts, too many registers.
 *
 * Names that CUDA defines keep their names and meaning.
 */
#ifndef GRADD_TESTS_EMU_EMU_H
#define GRADD_TESTS_EMU_EMU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <tuple>

#include "tests/sim/sim.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {
    }
};

namespace emu {

enum { WARP = 32, SHARED_LIMIT = 48 << 10 };

/* Where the running thread stands. */
struct emu_place_t {
    dim3 thread, block, threads, blocks;
    int index; /* of the thread in its block */
};
extern emu_place_t here;

/* Waits for all threads of the block, or of the warp. `at` is the location in the source. */
void wait_block(const char *at);
void wait_warp(const char *at);
/* Puts 8 bytes where the other lanes see them, waits, and takes those of `lane`. */
uint64_t exchange(uint64_t bits, int lane, const char *at);
/* The same for up to 32 bytes of all lanes: row l of the answer is lane l's. It stays until the
 * lane's next exchange. */
struct told_t {
    alignas(8) unsigned char bytes[32];
};
const told_t *tell(const void *mine, size_t bytes, const char *at);
/* 16 bytes that come (NULL: zeros) when the thread waits for its copies; until then the target
 * holds ones. */
void copy_later(void *to, const void *from, const char *at);
void wait_copies();
/* Bit l: lane l said true. */
uint32_t vote(bool mine, const char *at);
/* The block's shared memory for the declaration with that tag. */
void *shared(const void *tag, size_t bytes, const char *at);
/* The shared memory that the launch has asked for. */
void *shared_more();
/* All blocks, here and now. */
void launch(dim3 blocks, dim3 threads, size_t more, void (*run)(void *), void *argument,
            const char *kernel);

template <class T> T exchanged(T value, int lane, const char *at) {
    static_assert(sizeof(T) <= 8, "8 bytes at once");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, lane, at);
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct shape_t {
    dim3 blocks, threads;
    size_t more; /* shared memory */
};

/* A launch that waits for its turn in a stream, with its arguments. */
template <class F, class... A> struct waiting_t {
    shape_t shape;
    const char *kernel;
    F body;
    std::tuple<A...> arguments; /* of kernels: nothing to destroy */

    static void run_thread(void *self) {
        const waiting_t *w = (const waiting_t *)self;
        std::apply(w->body, w->arguments);
    }
    static void run(void *self) {
        const waiting_t *w = (const waiting_t *)self;
        const shape_t &s = w->shape;
        if (!sim_kernel_fails()) launch(s.blocks, s.threads, s.more, run_thread, self, w->kernel);
        free(self);
    }
};

template <class F, class... A>
void run_in_turn(void *stream, shape_t shape, const char *kernel, F body, A... arguments) {
    void *memory = malloc(sizeof(waiting_t<F, A...>));
    if (!memory) abort();
    sim_give((cudaStream_t)stream, waiting_t<F, A...>::run,
             new (memory) waiting_t<F, A...>{shape, kernel, body, {arguments...}});
}

static inline int lane() {
    return here.index % WARP;
}

} // namespace emu

#define EMU_TEXT2(x) #x
#define EMU_TEXT(x)  EMU_TEXT2(x)
#define EMU_AT       __FILE__ ":" EMU_TEXT(__LINE__)

#define threadIdx (emu::here.thread)
#define blockIdx  (emu::here.block)
#define blockDim  (emu::here.threads)
#define gridDim   (emu::here.blocks)

#define __syncthreads()          emu::wait_block(EMU_AT)
#define __syncwarp()             emu::wait_warp(EMU_AT)
#define __threadfence_system()   ((void)0)
#define __threadfence()          ((void)0)
#define __ballot_sync(m, v)      emu::vote(v, EMU_AT)
#define __any_sync(m, v)         (emu::vote(v, EMU_AT) != 0)
#define __shfl_sync(m, v, l)     emu::exchanged(v, (l) % 32, EMU_AT)
#define __shfl_xor_sync(m, v, l) emu::exchanged(v, emu::lane() ^ (l), EMU_AT)
#define __shfl_down_sync(m, v, n)                                                                  \
    emu::exchanged(v, emu::lane() + (n) < 32 ? emu::lane() + (n) : emu::lane(), EMU_AT)
#define __shfl_up_sync(m, v, n)                                                                    \
    emu::exchanged(v, emu::lane() >= (n) ? emu::lane() - (n) : emu::lane(), EMU_AT)

/* One thread runs at a time. */
template <class T> static inline T atomicCAS(T *p, T expected, T value) {
    const T old = *p;
    if (old == expected) *p = value;
    return old;
}
template <class T> static inline T atomicAdd(T *p, T value) {
    static_assert((T)0.5 == (T)0, "sums of floats have a fixed order");
    const T old = *p;
    *p = old + value;
    return old;
}
template <class T> static inline T atomicMin(T *p, T value) {
    static_assert((T)0.5 == (T)0, "integers");
    const T old = *p;
    if (value < old) *p = value;
    return old;
}
template <class T> static inline T atomicOr(T *p, T value) {
    const T old = *p;
    *p = old | value;
    return old;
}
template <class T> static inline T atomicMax(T *p, T value) {
    static_assert((T)0.5 == (T)0, "floats are compared in other ways");
    const T old = *p;
    *p = old < value ? value : old;
    return old;
}
static inline int __popc(uint32_t x) {
    return __builtin_popcount(x);
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}

#define GPU_SHARED(T, name, n)                                                                     \
    static const char name##_tag = 0;                                                              \
    T *const name = (T *)emu::shared(&name##_tag, sizeof(T) * (n), EMU_AT)
#define GPU_MORE(T, name) T *const name = (T *)emu::shared_more()
#define GPU_RUN(more, kernel, blocks, threads, ...)                                                \
    emu::run_in_turn(gpu_call.stream, emu::shape_t{blocks, threads, more}, #kernel,                \
                     [](auto... emu_arguments) { kernel(emu_arguments...); } __VA_OPT__(, )        \
                         __VA_ARGS__)
#define GPU_RUN_MORE(more, ...)                                                                    \
    (sim_takes_shared(more) ? GPU_RUN((size_t)(more), __VA_ARGS__) : (void)0)

#endif
