/* Recurrent layers on a GPU, step by step: a product of cuBLASLt, and a thread for each cell of
 * each sequence for what follows it. See kernels/ops/recurrent/recurrence.c. */
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/product.h"
#include "kernels/describe/recurrence.h"
#include "kernels/math/formulas.h"

#include <stdlib.h>

#define REAL    float
#define NAME(x) x##_f32
#include "kernels/math/recurrent.h"
#undef REAL
#undef NAME
#define REAL    double
#define NAME(x) x##_f64
#include "kernels/math/recurrent.h"
#undef REAL
#undef NAME

enum { THREADS = 256, ALIGN = 256 };

/* The functions of a type of sums. */
template <class R> struct cell_math;
#define CELL_MATH(R, S)                                                                            \
    template <> struct cell_math<R> {                                                              \
        typedef lstm_t_##S lstm;                                                                   \
        typedef gru_t_##S gru;                                                                     \
        static constexpr auto lstm_cell = lstm_cell_##S;                                           \
        static constexpr auto lstm_back = lstm_back_##S;                                           \
        static constexpr auto gru_cell = gru_cell_##S;                                             \
        static constexpr auto gru_back = gru_back_##S;                                             \
        static constexpr auto plain_cell = rnn_cell_##S;                                           \
        static constexpr auto plain_back = rnn_back_##S;                                           \
    };
CELL_MATH(float, f32)
CELL_MATH(double, f64)

/* One step of all sequences. Absent memory is NULL. Backward x are the gates, and gates the
 * gradients in front of their functions. */
template <class T> struct step_memory {
    typedef gpu_real<T> R;
    const T *x, *bias, *state, *dy;
    const R *before;
    R *product, *cell, *dcell;
    T *out, *gates, *dproduct;
};

enum { MOST = 4 }; /* gates; loops of a fixed length keep their arrays in registers */

template <class T> __global__ void GPU_BLOCK(THREADS) rnn_forward(gradd_rnn_t v, step_memory<T> m) {
    typedef gpu_real<T> R;
    typedef cell_math<R> M;
    const int64_t n = v.cells, all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < v.batch * n; e += all) {
        const int64_t j = e % n, at = e / n * v.gates * n + j;
        R x[MOST] = {0}, p[MOST] = {0}, s[MOST] = {0}, out;
        for (int g = 0; g < MOST; g++) {
            if (g >= v.gates) break;
            x[g] = gpu_get(m.x[at + g * n]);
            p[g] = m.product[at + g * n] + (m.bias ? gpu_get(m.bias[g * n + j]) : (R)0);
        }
        if (v.kind == GRADD_RNN_LSTM) {
            const typename M::lstm c =
                M::lstm_cell(x[0] + p[0], x[1] + p[1], x[2] + p[2], x[3] + p[3], m.before[e]);
            s[0] = c.i, s[1] = c.f, s[2] = c.g, s[3] = c.o, out = c.out;
            m.cell[e] = c.cell;
        } else if (v.kind == GRADD_RNN_GRU) {
            const typename M::gru c =
                M::gru_cell(x[0] + p[0], x[1] + p[1], x[2], p[2], gpu_get(m.state[e]));
            s[0] = c.r, s[1] = c.z, s[2] = c.n, out = c.out;
            m.cell[e] = c.kept;
        } else {
            s[0] = out = M::plain_cell(x[0] + p[0], v.kind == GRADD_RNN_RELU);
        }
        gpu_put(&m.out[e], out);
        for (int g = 0; g < MOST; g++)
            if (m.gates && g < v.gates) gpu_put(&m.gates[at + g * n], s[g]);
    }
}

template <class T> __global__ void GPU_BLOCK(THREADS) rnn_back(gradd_rnn_t v, step_memory<T> m) {
    typedef gpu_real<T> R;
    typedef cell_math<R> M;
    const int64_t n = v.cells, all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < v.batch * n; e += all) {
        const int64_t j = e % n, at = e / n * v.gates * n + j;
        const R dout = m.product[e] + (m.dy ? gpu_get(m.dy[e]) : (R)0);
        R s[MOST] = {0}, d[MOST] = {0};
        for (int g = 0; g < MOST; g++)
            if (g < v.gates) s[g] = gpu_get(m.x[at + g * n]);
        if (v.kind == GRADD_RNN_LSTM) {
            typename M::lstm c = {s[0], s[1], s[2], s[3], m.cell[e], 0};
            c = M::lstm_back(c, m.before[e], dout, m.dcell[e]);
            d[0] = c.i, d[1] = c.f, d[2] = c.g, d[3] = c.o;
            m.dcell[e] = c.cell;
            if (m.out) gpu_put(&m.out[e], c.out);
        } else if (v.kind == GRADD_RNN_GRU) {
            typename M::gru c = {s[0], s[1], s[2], m.cell[e], 0};
            c = M::gru_back(c, gpu_get(m.state[e]), dout);
            d[0] = c.r, d[1] = c.z, d[2] = c.n;
            m.product[e] = c.out;
            for (int g = 0; g < 2; g++)
                gpu_put(&m.dproduct[at + g * n], d[g]);
            gpu_put(&m.dproduct[at + 2 * n], c.kept);
        } else {
            d[0] = M::plain_back(s[0], dout, v.kind == GRADD_RNN_RELU);
        }
        for (int g = 0; g < MOST; g++) {
            if (g >= v.gates) break;
            gpu_put(&m.gates[at + g * n], d[g]);
            if (m.dproduct && v.kind != GRADD_RNN_GRU) gpu_put(&m.dproduct[at + g * n], d[g]);
        }
    }
}

/* z = x + y, of which either may be NULL: zeros. */
template <class Z, class X, class Y>
__global__ void GPU_BLOCK(THREADS) rnn_put(Z *z, const X *x, const Y *y, int64_t n) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all) {
        gpu_real<Z> sum = x ? (gpu_real<Z>)gpu_get(x[i]) : (gpu_real<Z>)0;
        if (y) sum += (gpu_real<Z>)gpu_get(y[i]);
        gpu_put(&z[i], sum);
    }
}

/* ---- of the host ----------------------------------------------------------------------------- */

typedef enum gpu_rnn_slot_e { LIBRARY, SUM, CELLS, FIRST, MADE, OUT, SPARE, SLOTS } gpu_rnn_slot_t;

typedef struct gpu_rnn_ready_s {
    gradd_rnn_t v;
    gradd_prepared_t product, projection;
    size_t at[SLOTS + 1];
} gpu_rnn_ready_t;

static void place(gpu_rnn_ready_t *k, bool back) {
    const gradd_rnn_t *v = &k->v;
    const size_t real = gradd_dtype_bytes(v->wide), cell = gradd_dtype_bytes(v->dtype);
    const size_t cells = (size_t)(v->batch * v->cells), states = (size_t)(v->batch * v->state);
    const size_t gates = cells * (size_t)v->gates, more = gates > states ? gates : states;
    size_t bytes[SLOTS] = {0};
    bytes[LIBRARY] = k->product.workspace > k->projection.workspace ? k->product.workspace
                                                                    : k->projection.workspace;
    bytes[SUM] = real * more;
    bytes[CELLS] = bytes[FIRST] = bytes[MADE] = real * cells;
    bytes[OUT] = cell * cells;
    bytes[SPARE] = back ? cell * more : 0;
    for (int i = 0; i < SLOTS; i++)
        k->at[i + 1] = k->at[i] + (bytes[i] + ALIGN - 1) / ALIGN * ALIGN;
}

static void unprepare(gradd_prepared_t *prepared) {
    gpu_rnn_ready_t *k = (gpu_rnn_ready_t *)prepared->state;
    if (k && k->product.state) gpu_product_unprepare(&k->product);
    if (k && k->projection.state) gpu_product_unprepare(&k->projection);
    free(k);
    prepared->state = NULL;
}

static gradd_status_t prepare_products(gpu_rnn_ready_t *k, bool back) {
    const gradd_rnn_t *v = &k->v;
    gradd_gemm_t g = back ? gradd_rnn_product_back(v) : gradd_rnn_product(v);
    GRADD_TRY(gpu_product_prepare(&g, &k->product));
    g = back ? gradd_rnn_projection_back(v) : gradd_rnn_projection(v);
    return v->has_proj ? gpu_product_prepare(&g, &k->projection) : GRADD_OK;
}

static gradd_status_t make_ready(const gradd_infer_t *c, bool back, gradd_prepared_t *out) {
    gpu_rnn_ready_t *k = (gpu_rnn_ready_t *)calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "recurrent layer");
    gradd_status_t status = back ? gradd_rnn_of_grad(c->in, c->n_in, c->attrs, &k->v)
                                 : gradd_rnn_of(c->in, c->n_in, c->attrs, &k->v);
    if (!status) status = prepare_products(k, back);
    place(k, back);
    *out = gradd_prepared_t{k->at[SLOTS], k, sizeof *k + k->product.bytes + k->projection.bytes};
    if (status) unprepare(out);
    return status;
}

static gradd_status_t prepare_forward(const gradd_infer_t *c, gradd_prepared_t *out) {
    return make_ready(c, false, out);
}

static gradd_status_t prepare_back(const gradd_infer_t *c, gradd_prepared_t *out) {
    return make_ready(c, true, out);
}

/* A launch for stored elements T. */
template <class T> struct rnn_call {
    typedef gpu_real<T> R;
    const gradd_launch_t *r;
    const gpu_rnn_ready_t *k;

    template <class A> A *slot(gpu_rnn_slot_t at) const {
        return (A *)((char *)r->workspace + k->at[at]);
    }
    /* Of an operand or a result; of one that holds all steps row `row` of n. NULL: absent. */
    template <class A> const A *in(int i, int64_t row = 0, int64_t n = 0) const {
        const bool is = i < r->n_in && r->in[i].type.dtype;
        return is ? (const A *)r->in[i].data + row * n : NULL;
    }
    template <class A> A *out(int j, int64_t row = 0, int64_t n = 0) const {
        A *p = j < r->n_out ? (A *)r->out[j].data : NULL;
        return p ? p + row * n : NULL;
    }
    gradd_status_t multiply(const gradd_prepared_t &by, const T *a, const T *b, R *c) const {
        const gpu_product_call_t call = {a, b, NULL, c, slot<char>(LIBRARY), NULL};
        return gpu_product(by.state, &call);
    }
    template <class Z, class X, class Y>
    gradd_status_t put(Z *z, const X *x, const Y *y, int64_t n) const {
        if (!z || !n) return GRADD_OK;
        GPU_LAUNCH((rnn_put<Z, X, Y>), gpu_blocks(n, THREADS), THREADS, z, x, y, n);
        return gpu_launched("Recurrence");
    }
};

template <class T> struct forward_call : rnn_call<T> {
    typedef gpu_real<T> R;
    using rnn_call<T>::k;

    const T *state(int64_t i) const {
        const gradd_rnn_t &v = k->v;
        if (i < 0) return this->template in<T>(GRADD_RNN_STATE);
        return this->template out<T>(GRADD_RNN_Y, gradd_rnn_at(&v, i) * v.batch, v.state);
    }
    R *cells(int64_t i) const {
        const gradd_rnn_t &v = k->v;
        R *own = this->template slot<R>(CELLS);
        if (i < 0) return own;
        R *all = this->template out<R>(GRADD_RNN_KEPT, gradd_rnn_at(&v, i) * v.batch, v.cells);
        return all ? all : own;
    }
    gradd_status_t step(int64_t i) const {
        const gradd_rnn_t &v = k->v;
        const int64_t row = gradd_rnn_at(&v, i) * v.batch, gates = v.gates * v.cells;
        R *sum = this->template slot<R>(SUM);
        step_memory<T> m = {};
        m.x = this->template in<T>(GRADD_RNN_X, row, gates);
        m.bias = this->template in<T>(GRADD_RNN_BIAS);
        m.state = state(i - 1), m.before = cells(i - 1), m.cell = cells(i), m.product = sum;
        m.gates = this->template out<T>(GRADD_RNN_GATES, row, gates);
        m.out = v.has_proj ? this->template slot<T>(OUT) : (T *)state(i);
        GRADD_TRY(this->multiply(k->product, state(i - 1), this->template in<T>(GRADD_RNN_U), sum));
        GPU_LAUNCH((rnn_forward<T>), gpu_blocks(v.batch * v.cells, THREADS), THREADS, v, m);
        GRADD_TRY(gpu_launched("Recurrence"));
        if (!v.has_proj) return GRADD_OK;
        GRADD_TRY(this->multiply(k->projection, m.out, this->template in<T>(GRADD_RNN_PROJ), sum));
        return this->put((T *)state(i), sum, (const R *)NULL, v.batch * v.state);
    }
    gradd_status_t run() const {
        const gradd_rnn_t &v = k->v;
        const int64_t n = v.batch * v.cells, steps = n ? v.steps : 0;
        const T *first = this->template in<T>(GRADD_RNN_CELLS), *none = NULL;
        const R *no_cells = NULL;
        GRADD_TRY(this->put(cells(-1), first, none, n));
        for (int64_t i = 0; i < steps; i++)
            GRADD_TRY(step(i));
        T *last = this->template out<T>(GRADD_RNN_LAST);
        GRADD_TRY(this->put(last, state(v.steps - 1), none, v.batch * v.state));
        const R *behind = v.kind == GRADD_RNN_LSTM ? cells(v.steps - 1) : no_cells;
        return this->put(this->template out<T>(GRADD_RNN_LAST_CELLS), behind, none, n);
    }
};

template <class T> struct back_call : rnn_call<T> {
    typedef gpu_real<T> R;
    using rnn_call<T>::k;

    /* The state's gradient at a step, stored, and through the projection. */
    gradd_status_t project(int64_t row, const T *dy) const {
        const gradd_rnn_t &v = k->v;
        T *whole = this->template out<T>(GRADD_RNN_DPROJECTED, row, v.state);
        if (!whole) whole = this->template slot<T>(SPARE);
        GRADD_TRY(this->put(whole, this->template slot<R>(SUM), dy, v.batch * v.state));
        return this->multiply(k->projection, whole, this->template in<T>(GRADD_RNN_GRAD_PROJ),
                              this->template slot<R>(MADE));
    }
    gradd_status_t step(int64_t i) const {
        const gradd_rnn_t &v = k->v;
        const int64_t row = gradd_rnn_at(&v, i) * v.batch, n = v.cells, gates = v.gates * n;
        const int64_t before = i ? gradd_rnn_at(&v, i - 1) * v.batch : 0;
        R *sum = this->template slot<R>(SUM);
        step_memory<T> m = {};
        m.x = this->template in<T>(GRADD_RNN_GRAD_GATES, row, gates);
        m.dy = this->template in<T>(GRADD_RNN_GRAD_DY, row, v.state);
        m.product = sum;
        if (v.has_proj) {
            GRADD_TRY(project(row, m.dy));
            m.dy = NULL, m.product = this->template slot<R>(MADE);
        }
        m.state = i ? this->template in<T>(GRADD_RNN_GRAD_Y, before, v.state)
                    : this->template in<T>(GRADD_RNN_GRAD_STATE);
        m.before = i ? this->template in<R>(GRADD_RNN_GRAD_KEPT, before, n)
                     : this->template slot<R>(FIRST);
        m.cell = (R *)this->template in<R>(GRADD_RNN_GRAD_KEPT, row, n);
        m.dcell = this->template slot<R>(CELLS);
        m.out = this->template out<T>(GRADD_RNN_PROJECTS, row, n);
        m.gates = this->template out<T>(GRADD_RNN_DX, row, gates);
        m.dproduct = this->template out<T>(GRADD_RNN_DPRODUCT, row, gates);
        if (!m.dproduct && v.kind == GRADD_RNN_GRU) m.dproduct = this->template slot<T>(SPARE);
        GPU_LAUNCH((rnn_back<T>), gpu_blocks(v.batch * n, THREADS), THREADS, v, m);
        GRADD_TRY(gpu_launched("RecurrenceGrad"));
        const T *d = v.kind == GRADD_RNN_GRU ? m.dproduct : m.gates;
        return this->multiply(k->product, d, this->template in<T>(GRADD_RNN_GRAD_U), sum);
    }
    gradd_status_t run() const {
        const gradd_rnn_t &v = k->v;
        const int64_t n = v.batch * v.cells, states = v.batch * v.state, steps = n ? v.steps : 0;
        R *sum = this->template slot<R>(SUM), *cells = this->template slot<R>(CELLS);
        const T *none = NULL;
        GRADD_TRY(this->put(sum, this->template in<T>(GRADD_RNN_GRAD_DLAST), none, states));
        GRADD_TRY(this->put(cells, this->template in<T>(GRADD_RNN_GRAD_DLAST_CELLS), none, n));
        const T *first = this->template in<T>(GRADD_RNN_GRAD_CELLS);
        GRADD_TRY(this->put(this->template slot<R>(FIRST), first, none, n));
        for (int64_t i = steps - 1; i >= 0; i--)
            GRADD_TRY(step(i));
        GRADD_TRY(this->put(this->template out<T>(GRADD_RNN_DSTATE), sum, none, states));
        return this->put(this->template out<T>(GRADD_RNN_DCELLS), cells, none, n);
    }
};

static gradd_status_t compute_forward(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_RNN_X].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        forward_call<T> call;
        call.r = r, call.k = (const gpu_rnn_ready_t *)r->state;
        return call.run();
    });
}

static gradd_status_t compute_back(const gradd_launch_t *r) {
    return gpu_switch(gpu_floats(), r->in[GRADD_RNN_GRAD_GATES].type.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        back_call<T> call;
        call.r = r, call.k = (const gpu_rnn_ready_t *)r->state;
        return call.run();
    });
}

GRADD_KERNELS(cuda, recurrence,
              GRADD_KERNEL("Recurrence", "steps", .types = {GPU_T_FLOAT},
                           .compute = compute_forward, .prepare = prepare_forward,
                           .unprepare = unprepare, .cost = gradd_rnn_cost),
              GRADD_KERNEL("RecurrenceGrad", "steps",
                           .types = {GPU_T_FLOAT, GPU_T_FLOAT, GPU_T_FLOAT, GPU_T_FLOAT,
                                     GRADD_T_F32_F64, GPU_T_FLOAT},
                           .inplace = 1, .compute = compute_back, .prepare = prepare_back,
                           .unprepare = unprepare, .cost = gradd_rnn_grad_cost));
