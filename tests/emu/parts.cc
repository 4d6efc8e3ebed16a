/* See parts.h. */
#include "tests/emu/parts.h"

#include <stdlib.h>

#include "kernels/cuda/attention/attention_gpu.h"
#include "kernels/cuda/index/runs.h"

extern "C" int64_t emu_divide(int64_t by, int64_t most, int64_t a) {
    return gpu_div_by(by, most)(a);
}

template <class K>
static gradd_status_t sort_as(const uint64_t *key, int64_t n, uint64_t largest, int64_t *out_at) {
    gpu_room room = {};
    gpu_sort_room<K>(&room, n);
    room.at = (char *)aligned_alloc(64, room.bytes);
    room.bytes = 0;
    gpu_sort_t<K> s = gpu_sort_room<K>(&room, n);
    for (int64_t i = 0; i < n; i++)
        s.key[i] = (K)key[i];
    const gradd_status_t status = gpu_sort("sort", &s, largest);
    for (int64_t i = 0; i < n; i++)
        out_at[i] = (int64_t)s.at[i];
    free(room.at);
    return status;
}

extern "C" gradd_status_t emu_sort(bool wide, const uint64_t *key, int64_t n, uint64_t largest,
                                   int64_t *out_at) {
    gpu_call.units = 2;
    return wide ? sort_as<uint64_t>(key, n, largest, out_at)
                : sort_as<uint32_t>(key, n, largest, out_at);
}

struct listed {
    const int64_t *row;

    int64_t operator()(int64_t i, gpu_faults_t) const {
        return row[i];
    }
};

extern "C" gradd_status_t emu_sum_rows(bool wide, const emu_sums_t *sums) {
    gpu_room room = {};
    if (wide)
        gpu_fold_room_of<float, uint64_t>(&room, sums->n, sums->width, true);
    else
        gpu_fold_room_of<float, uint32_t>(&room, sums->n, sums->width, true);
    gpu_fold_rows_t s = {.n = sums->n,
                         .n_rows = sums->n_rows,
                         .width = sums->width,
                         .how = GPU_SCALED,
                         .scale = 0.5,
                         .to = sums->to,
                         .from = sums->from,
                         .workspace = aligned_alloc(64, room.bytes)};
    gpu_call.units = 2;
    const gradd_status_t status =
        wide ? gpu_fold_keyed<float, uint64_t>("sums", &s, listed{sums->row})
             : gpu_fold_keyed<float, uint32_t>("sums", &s, listed{sums->row});
    free(s.workspace);
    return status;
}

extern "C" void emu_limit_scores(int64_t bytes, int64_t blocks) {
    attn_scores_limit = {bytes, blocks};
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

extern "C" uint32_t emu_widen_f16(uint16_t bits) {
    const float x = gpu_f16_f32(gradd_f16_t{bits});
    uint32_t out;
    memcpy(&out, &x, sizeof out);
    return out;
}

extern "C" uint16_t emu_narrow_f16(uint32_t bits) {
    return gpu_f32_f16(float_of(bits)).bits;
}

extern "C" uint16_t emu_narrow_bf16(uint32_t bits) {
    return gpu_f32_bf16(float_of(bits)).bits;
}
