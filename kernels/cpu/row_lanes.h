/* Sums over a row in 32 independent lanes, written once for f32, f64 and bf16.
 *
 * Included with REAL (the C type that is calculated in) and NAME(x) (appends a suffix) defined,
 * once per type; there is no guard on purpose. Where elements are stored in another type, CELL is
 * that type and LOAD and STORE convert. Lanes vectorise and keep the rounding error of a long row
 * small; they are added in pairs at the end, so a row always gives the same bits.
 */

#ifndef CELL
#define CELL     REAL
#define LOAD(x)  (x)
#define STORE(x) (x)
#endif

static inline REAL NAME(add_lanes)(REAL *lane) {
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static inline REAL NAME(row_sum)(const CELL *x, int64_t n) {
    REAL lane[32] = {0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 32; k++)
            lane[k] += LOAD(x[i + k]);
    for (int k = 0; i < n; i++, k++)
        lane[k] += LOAD(x[i]);
    return NAME(add_lanes)(lane);
}

/* Sum of (x - mean)^2 */
static inline REAL NAME(row_squares)(const CELL *x, REAL mean, int64_t n) {
    REAL lane[32] = {0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 32; k++)
            lane[k] += (LOAD(x[i + k]) - mean) * (LOAD(x[i + k]) - mean);
    for (int k = 0; i < n; i++, k++)
        lane[k] += (LOAD(x[i]) - mean) * (LOAD(x[i]) - mean);
    return NAME(add_lanes)(lane);
}
