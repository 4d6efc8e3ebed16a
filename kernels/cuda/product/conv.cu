/* Convolutions on a GPU, directly: a thread for each element of the result. See
 * kernels/describe/conv.h.
 *
 * A thread of y or dx adds up the channels of each tap that its element takes part in, then the
 * taps; a block of dW the positions of all images, its threads in turn and then in a tree. The
 * order depends on sizes alone; sums are f32 for halves and f32, with fused multiply-adds. */
#include "kernels/cuda/gpu.h"
#include "kernels/describe/conv.h"

enum { THREADS = 256, AXES = GRADD_CONV_AXES };

/* Channels of a group, elements of a channel. */
struct counts_t {
    int64_t in, out, x, y, taps;
};

static counts_t count(const gradd_conv_t &v) {
    return {v.in / v.groups, v.out / v.groups, gradd_conv_volume(v.x), gradd_conv_volume(v.y),
            gradd_conv_volume(v.kernel)};
}

GPU_FN float multiply_add(float a, float b, float sum) {
    return fmaf(a, b, sum);
}
GPU_FN double multiply_add(double a, double b, double sum) {
    return fma(a, b, sum);
}

/* The element of x that position o reads by tap k, -1: a zero. */
GPU_FN int64_t read_by(const gradd_conv_t &v, int64_t o, int64_t k) {
    int64_t place = 0, stride = 1;
#pragma unroll
    for (int a = AXES - 1; a >= 0; a--) {
        const int64_t at = gradd_conv_at(&v, a, o % v.y[a], k % v.kernel[a]);
        if (at < 0 || at >= v.x[a]) return -1;
        place += at * stride;
        stride *= v.x[a], o /= v.y[a], k /= v.kernel[a];
    }
    return place;
}

/* The position that reads element i of x by tap k, -1: there is none. */
GPU_FN int64_t reader_of(const gradd_conv_t &v, int64_t i, int64_t k) {
    int64_t place = 0, stride = 1;
#pragma unroll
    for (int a = AXES - 1; a >= 0; a--) {
        const int64_t o = gradd_conv_reader(&v, a, i % v.x[a], k % v.kernel[a]);
        if (o < 0) return -1;
        place += o * stride;
        stride *= v.y[a], i /= v.x[a], k /= v.kernel[a];
    }
    return place;
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    conv_y(gradd_conv_t v, counts_t n, T *y, const T *x, const T *w, const T *bias) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, count = v.images * v.out * n.y;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += all) {
        const int64_t o = e % n.y, m = e / n.y % v.out, image = e / n.y / v.out;
        const T *from = x + (image * v.in + m / n.out * n.in) * n.x, *taps = w + m * n.in * n.taps;
        gpu_real<T> sum = 0;
        for (int64_t k = 0; k < n.taps; k++) {
            const int64_t i = read_by(v, o, k);
            gpu_real<T> part = 0;
            for (int64_t c = 0; i >= 0 && c < n.in; c++)
                part =
                    multiply_add(gpu_get(from[c * n.x + i]), gpu_get(taps[c * n.taps + k]), part);
            sum += part;
        }
        gpu_put(&y[e], bias ? sum + gpu_get(bias[m]) : sum);
    }
}

template <class T>
__global__ void GPU_BLOCK(THREADS)
    conv_x(gradd_conv_t v, counts_t n, T *x, const T *y, const T *w, const T *bias) {
    const int64_t all = (int64_t)gridDim.x * blockDim.x, count = v.images * v.in * n.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += all) {
        const int64_t i = e % n.x, channel = e / n.x % v.in, image = e / n.x / v.in;
        const int64_t first = channel / n.in * n.out, row = n.in * n.taps;
        const T *from = y + (image * v.out + first) * n.y;
        const T *taps = w + (first * n.in + channel % n.in) * n.taps;
        gpu_real<T> sum = 0;
        for (int64_t k = 0; k < n.taps; k++) {
            const int64_t o = reader_of(v, i, k);
            gpu_real<T> part = 0;
            for (int64_t m = 0; o >= 0 && m < n.out; m++)
                part = multiply_add(gpu_get(from[m * n.y + o]), gpu_get(taps[m * row + k]), part);
            sum += part;
        }
        gpu_put(&x[e], bias ? sum + gpu_get(bias[channel]) : sum);
    }
}

/* A block for each element of W. */
template <class T>
__global__ void GPU_BLOCK(THREADS)
    conv_w(gradd_conv_t v, counts_t n, T *w, const T *x, const T *y) {
    GPU_SHARED(gpu_real<T>, part, THREADS / GPU_WARP);
    const int64_t count = v.out * n.in * n.taps, positions = v.images * n.y;
    for (int64_t e = blockIdx.x; e < count; e += gridDim.x) {
        const int64_t k = e % n.taps, c = e / n.taps % n.in, m = e / n.taps / n.in;
        const int64_t channel = m / n.out * n.in + c;
        gpu_real<T> sum = 0;
        for (int64_t p = threadIdx.x; p < positions; p += THREADS) {
            const int64_t image = p / n.y, o = p % n.y, i = read_by(v, o, k);
            if (i >= 0)
                sum = multiply_add(gpu_get(x[(image * v.in + channel) * n.x + i]),
                                   gpu_get(y[(image * v.out + m) * n.y + o]), sum);
        }
        sum = gpu_warp_sum(sum);
        if (threadIdx.x % GPU_WARP == 0) part[threadIdx.x / GPU_WARP] = sum;
        __syncthreads();
        if (!threadIdx.x) {
            for (int i = 1; i < THREADS / GPU_WARP; i++)
                sum += part[i];
            gpu_put(&w[e], sum);
        }
        __syncthreads();
    }
}

static const void *bias_of(const gradd_launch_t *r, int at) {
    return at < r->n_in && r->in[at].type.dtype ? r->in[at].data : NULL;
}

static gradd_status_t compute_conv(const gradd_launch_t *r) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_conv(r->in, r->n_in, r->attrs, &v));
    const int64_t n = gradd_type_count(&r->out[0].type);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), v.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((conv_y<T>), gpu_blocks(n, THREADS), THREADS, v, count(v), (T *)r->out[0].data,
                   (const T *)r->in[GRADD_CONV_X].data, (const T *)r->in[GRADD_CONV_W].data,
                   (const T *)bias_of(r, GRADD_CONV_BIAS));
        return gpu_launched("Conv");
    });
}

static gradd_status_t compute_data(const gradd_launch_t *r) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_data(r->in, r->n_in, r->attrs, &v));
    const int64_t n = gradd_type_count(&r->out[0].type);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), v.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((conv_x<T>), gpu_blocks(n, THREADS), THREADS, v, count(v), (T *)r->out[0].data,
                   (const T *)r->in[GRADD_CONV_DATA_DY].data,
                   (const T *)r->in[GRADD_CONV_DATA_W].data,
                   (const T *)bias_of(r, GRADD_CONV_DATA_BIAS));
        return gpu_launched("ConvDataGrad");
    });
}

static gradd_status_t compute_weight(const gradd_launch_t *r) {
    gradd_conv_t v;
    GRADD_TRY(gradd_conv_of_weight(r->in, r->n_in, r->attrs, &v));
    const int64_t n = gradd_type_count(&r->out[0].type);
    if (!n) return GRADD_OK;
    return gpu_switch(gpu_floats(), v.dtype, [&](auto t) {
        typedef typename decltype(t)::type T;
        GPU_LAUNCH((conv_w<T>), gpu_blocks(n, 1), THREADS, v, count(v), (T *)r->out[0].data,
                   (const T *)r->in[GRADD_CONV_WEIGHT_X].data,
                   (const T *)r->in[GRADD_CONV_WEIGHT_DY].data);
        return gpu_launched("ConvWeightGrad");
    });
}

GRADD_KERNELS(cuda, conv,
              GRADD_KERNEL("Conv", "direct", .types = {GPU_T_FLOAT}, .compute = compute_conv,
                           .cost = gradd_conv_cost),
              GRADD_KERNEL("ConvDataGrad", "direct", .types = {GPU_T_FLOAT},
                           .compute = compute_data, .cost = gradd_conv_cost),
              GRADD_KERNEL("ConvWeightGrad", "direct", .types = {GPU_T_FLOAT},
                           .compute = compute_weight, .cost = gradd_conv_cost));
