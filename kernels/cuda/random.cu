/* Random numbers on a GPU: a thread makes the four numbers of one counter of Philox, neighbours
 * write neighbours. The same bits as on the CPU. See kernels/ops/random/random.c and rng.h. */
#include "kernels/cuda/gpu.h"
#include "kernels/math/formulas.h"
#include "kernels/math/rng.h"

enum { THREADS = 256 };

struct draw_t {
    uint64_t seed, node;
    bool normal, still;
    double a, b; /* mean and deviation, or low and width */
};

/* The first element of a counter; the others follow in distances of 16. */
GPU_FN int64_t first_of(int64_t counter) {
    return counter / 16 * GRADD_RNG_GROUP + counter % 16;
}
static int64_t counters_of(int64_t n) {
    return (n + GRADD_RNG_GROUP - 1) / GRADD_RNG_GROUP * 16;
}

/* In double, rounded once. */
template <class U> GPU_FN void put(U *y, double x) {
    gpu_put(y, (gpu_real<U>)x);
}

template <class U, bool NORMAL>
__global__ void GPU_BLOCK(THREADS) draw(draw_t d, int64_t n, int64_t counters, U *y) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < counters; i += all) {
        const int64_t first = first_of(i);
        uint32_t words[4];
        gradd_rng_four(d.seed, d.node, (uint64_t)i, words);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            double unit = 0.5;
            if (NORMAL && !d.still)
                unit = gradd_rng_normal(words[k & 2], words[k | 1], k & 1);
            else if (!d.still)
                unit = gradd_rng_uniform(words[k]);
            if (first + 16 * k < n) put(&y[first + 16 * k], d.a + d.b * unit);
        }
    }
}

template <class T, class U>
__global__ void GPU_BLOCK(THREADS)
    events(draw_t d, int64_t n, int64_t counters, U *y, const T *x, gpu_faults_t faults) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < counters; i += all) {
        const int64_t first = first_of(i);
        uint32_t words[4];
        gradd_rng_four(d.seed, d.node, (uint64_t)i, words);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t at = first + 16 * k;
            if (at >= n) continue;
            const double p = (double)gpu_get(x[at]), word = d.still ? 0x1p31 : (double)words[k];
            if (!(p >= 0 && p <= 1)) {
                gradd_fault_t fault = {.kind = GRADD_FAULT_PROBABILITY, .position = at};
                memcpy(&fault.value, &p, sizeof p);
                gpu_fault(faults, fault);
            }
            put(&y[at], word < p * 0x1p32);
        }
    }
}

/* ---- of the host ---- */

static uint64_t seed_of(const gradd_launch_t *r) {
    const gradd_attr_t *fixed = gradd_attr_find(r->attrs, "seed");
    if (!fixed) return r->seed;
    const float own = (float)fixed->f;
    uint64_t seed = 0;
    memcpy(&seed, &own, sizeof own);
    return seed;
}

static gradd_status_t compute_random(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->out[0].type), counters = counters_of(n);
    draw_t d = {.seed = seed_of(r), .node = r->node, .still = r->dropout_off};
    d.normal = !strncmp(r->op->name, "RandomNormal", 12);
    d.a = gradd_attr_float(r->attrs, d.normal ? "mean" : "low", 0);
    d.b = d.normal ? gradd_attr_float(r->attrs, "scale", 1)
                   : gradd_attr_float(r->attrs, "high", 1) - d.a;
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), r->out[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type U;
        if (d.normal)
            GPU_LAUNCH((draw<U, true>), gpu_blocks(counters, THREADS), THREADS, d, n, counters,
                       (U *)r->out[0].data);
        else
            GPU_LAUNCH((draw<U, false>), gpu_blocks(counters, THREADS), THREADS, d, n, counters,
                       (U *)r->out[0].data);
        return gpu_launched(r->op->name);
    });
}

static gradd_status_t compute_bernoulli(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->out[0].type), counters = counters_of(n);
    const draw_t d = {.seed = seed_of(r), .node = r->node, .still = r->dropout_off};
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        return gpu_switch(gpu_any(), r->out[0].type.dtype, [&](auto u) {
            typedef typename decltype(u)::type U;
            GPU_LAUNCH((events<T, U>), gpu_blocks(counters, THREADS), THREADS, d, n, counters,
                       (U *)r->out[0].data, (const T *)r->in[0].data, GPU_FAULTS);
            return gpu_launched("Bernoulli");
        });
    });
}

GRADD_KERNELS(cuda, random, GRADD_KERNEL("RandomNormalLike", "random", .compute = compute_random),
              GRADD_KERNEL("RandomUniformLike", "random", .compute = compute_random),
              GRADD_KERNEL("RandomNormal", "random", .compute = compute_random),
              GRADD_KERNEL("RandomUniform", "random", .compute = compute_random),
              GRADD_KERNEL("Bernoulli", "random", .compute = compute_bernoulli));
