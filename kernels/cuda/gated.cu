/* GatedActivation and its gradient on a GPU: each thread makes a pack of results from the packs of
 * its gate and operand, which lie apart or in the halves of one row. See
 * kernels/ops/elementwise/gated.c. */
#include "kernels/cuda/map.h"

#include "kernels/math/activate.h"

#include <string.h>

enum { THREADS = 256 };

/* Rows of n elements, or of n packs in a kernel; the pointers are of the first row. */
struct rows_t {
    const void *g, *u, *dy;
    void *y, *dg, *du; /* dg and du may be NULL */
    int64_t rows, n;
    int64_t stride;     /* from row to row of g, u, dg, du; y and dy have n */
    bool small;         /* numbers are below 2^31 */
    gpu_map_divisor by; /* n, if small */
    double alpha;

    __device__ int64_t place(int64_t i) const {
        const int64_t row = small ? by.quotient(i) : i / n;
        return row * stride + (i - row * n);
    }
};

#define GATE(f, CHOOSES)                                                                           \
    struct gate_##f {                                                                              \
        static __device__ act_t_f32 at(float x, float alpha) {                                     \
            return act_##f##_f32(x, alpha);                                                        \
        }                                                                                          \
        static __device__ act_t_f64 at(double x, double alpha) {                                   \
            return act_##f##_f64(x, alpha);                                                        \
        }                                                                                          \
        /* the gradient behind f: that of relu is chosen */                                        \
        template <class R> static __device__ R behind(R v, R slope) {                              \
            return CHOOSES && !(slope != 0) ? (R)0 : CHOOSES ? v : v * slope;                      \
        }                                                                                          \
    };
GATE(swish, false)
GATE(gelu, false)
GATE(gelu_tanh, false)
GATE(relu, true)
GATE(sigmoid, false)

template <int W, class T, class G> __global__ void GPU_BLOCK(THREADS) gate(rows_t p) {
    typedef gpu_pack<T, W> pack_t;
    typedef gpu_real<T> R;
    const int64_t all = (int64_t)gridDim.x * blockDim.x, n = p.rows * p.n;
#pragma unroll 1
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const int64_t at = p.place(i);
        const pack_t g = ((const pack_t *)p.g)[at], u = ((const pack_t *)p.u)[at];
        pack_t y;
#pragma unroll
        for (int k = 0; k < W; k++)
            gpu_put(&y.v[k], G::at(gpu_get(g.v[k]), (R)p.alpha).value * gpu_get(u.v[k]));
        ((pack_t *)p.y)[i] = y;
    }
}

template <int W, class T, class G> __global__ void GPU_BLOCK(THREADS) gate_grad(rows_t p) {
    typedef gpu_pack<T, W> pack_t;
    typedef gpu_real<T> R;
    const int64_t all = (int64_t)gridDim.x * blockDim.x, n = p.rows * p.n;
#pragma unroll 1
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        const int64_t at = p.place(i);
        const pack_t g = ((const pack_t *)p.g)[at], u = ((const pack_t *)p.u)[at],
                     dy = ((const pack_t *)p.dy)[i];
        pack_t dg, du;
#pragma unroll
        for (int k = 0; k < W; k++) {
            const auto f = G::at(gpu_get(g.v[k]), (R)p.alpha);
            const R d = gpu_get(dy.v[k]), up = gpu_get(u.v[k]);
            gpu_put(&dg.v[k], G::behind(d * up, (R)f.slope));
            gpu_put(&du.v[k], d * f.value);
        }
        if (p.dg) ((pack_t *)p.dg)[at] = dg;
        if (p.du) ((pack_t *)p.du)[at] = du;
    }
}

/* ---- of the host ---- */

/* in: g, u or the packed pair; out (backward): likewise */
static rows_t describe(const gradd_launch_t *r, const gradd_view_t *in, int n_in, bool backward) {
    const gradd_type_t *type = &in[0].type;
    rows_t p = {.rows = 1, .alpha = gradd_attr_float(r->attrs, "alpha", 1)};
    const bool second = gradd_attr_int(r->attrs, "gate", 0) == 1; /* g is the second half */
    p.stride = p.n = gradd_type_count(type);
    if (n_in == 1) {
        p.stride = type->dims[type->rank - 1];
        p.rows = p.stride ? gradd_type_count(type) / p.stride : 0;
        p.n = p.stride / 2;
    }
    const int64_t half = p.n * (int64_t)gradd_dtype_bytes(type->dtype);
    const int64_t to_g = n_in == 1 && second ? half : 0, to_u = n_in == 1 && !second ? half : 0;
    p.g = (const char *)in[0].data + to_g;
    p.u = (const char *)in[n_in - 1].data + to_u;
    if (!backward) {
        p.y = r->out[0].data;
        return p;
    }
    p.dy = r->in[0].data;
    p.dg = r->out[0].data;
    p.du = r->n_out > 1 ? r->out[1].data : NULL;
    if (n_in == 1) {
        p.dg = (char *)r->out[0].data + to_g;
        p.du = (char *)r->out[0].data + to_u;
    }
    return p;
}

static bool aligned(const rows_t &p) {
    const void *all[] = {p.g, p.u, p.dy, p.y, p.dg, p.du};
    for (const void *at : all)
        if (!gpu_aligned(at, 16)) return false;
    return true;
}

template <int W, class T, class G>
static gradd_status_t compute_packs(const gradd_launch_t *r, rows_t p) {
    p.n /= W, p.stride /= W;
    p.small = p.rows * p.n <= INT32_MAX;
    if (p.small) p.by = gpu_map_divisor_of(p.n);
    const unsigned blocks = gpu_blocks(p.rows * p.n, THREADS);
    if (p.dy)
        GPU_LAUNCH((gate_grad<W, T, G>), blocks, THREADS, p);
    else
        GPU_LAUNCH((gate<W, T, G>), blocks, THREADS, p);
    return gpu_launched(r->op->name);
}

template <class G> static gradd_status_t compute_by(const gradd_launch_t *r, const rows_t &p) {
    return gpu_switch(gpu_floats(), r->in[0].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        constexpr int W = gpu_width<T>;
        return p.n % W == 0 && aligned(p) ? compute_packs<W, T, G>(r, p)
                                          : compute_packs<1, T, G>(r, p);
    });
}

static gradd_status_t compute(const gradd_launch_t *r, const rows_t &p) {
    const char *name = gradd_attr_string(r->attrs, "activation", "");
    if (!p.rows || !p.n) return GRADD_OK;
    if (!strcmp(name, "swish")) return compute_by<gate_swish>(r, p);
    if (!strcmp(name, "gelu")) return compute_by<gate_gelu>(r, p);
    if (!strcmp(name, "gelu_tanh")) return compute_by<gate_gelu_tanh>(r, p);
    if (!strcmp(name, "relu")) return compute_by<gate_relu>(r, p);
    return compute_by<gate_sigmoid>(r, p);
}

static gradd_status_t compute_gated(const gradd_launch_t *r) {
    return compute(r, describe(r, r->in, r->n_in, false));
}
static gradd_status_t compute_gated_grad(const gradd_launch_t *r) {
    return compute(r, describe(r, r->in + 1, r->n_in - 1, true));
}

GRADD_KERNELS(cuda, gated,
              GRADD_KERNEL("GatedActivation", "map", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_gated),
              GRADD_KERNEL("GatedActivationGrad", "map", .types = {GRADD_T_ANY}, .inplace = 7,
                           .compute = compute_gated_grad));
