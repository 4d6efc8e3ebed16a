/* See finite.h. */
#include "kernels/cpu/finite.h"

#include <math.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

/* Element of a float type; 0 of any other. */
static double float_at(const gradd_view_t *v, int64_t i) {
    switch (v->type.dtype) {
    case GRADD_DT_F32:
        return (double)((const float *)v->data)[i];
    case GRADD_DT_F64:
        return ((const double *)v->data)[i];
    case GRADD_DT_BF16:
        return (double)gradd_bf16_f32(((const gradd_bf16_t *)v->data)[i]);
    case GRADD_DT_F16:
        return (double)gradd_f16_f32(((const gradd_f16_t *)v->data)[i]);
    default:
        return 0;
    }
}

gradd_nonfinite_t gradd_cpu_find_nonfinite(const gradd_view_t *v) {
    gradd_nonfinite_t found = {.nan = -1, .inf = -1};
    const int64_t n = gradd_type_count(&v->type);
    for (int64_t i = 0; i < n && (found.nan < 0 || found.inf < 0); i++) {
        const double x = float_at(v, i);
        if (isfinite(x)) continue;
        if (isnan(x) && found.nan < 0) found.nan = i;
        if (isnan(x) || found.inf >= 0) continue;
        found.inf = i;
        found.negative = x < 0;
    }
    return found;
}
