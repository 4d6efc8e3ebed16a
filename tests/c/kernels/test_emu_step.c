/* Scans, fingerprints and the optimizer's step on the emulated GPU beside the CPU's: the same
 * numbers, in every order of threads. */
#include "kernels/cpu/half.h"
#include "tests/emu/device.h"
#include "tests/emu/order.h"
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 140000 };
static const int sizes[] = {0, 1, 7, 63, 64, 65, 1024, 5000, 70001, MOST};
static const long orders[] = {0, 3, 17};
#define EACH(i, list) for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)

static float number(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (float)((double)(*state >> 40) / (1 << 23) - 1);
}

static float *numbers(int n, uint64_t seed) {
    float *x = malloc(sizeof *x * (size_t)(n + 8));
    CHECK(x != NULL);
    for (int i = 0; i < n + 8; i++)
        x[i] = number(&seed);
    return x;
}

static gradd_dtype_t half_type = GRADD_DT_BF16; /* bf16 or f16, now */
static const gradd_dtype_t halves[] = {GRADD_DT_BF16, GRADD_DT_F16};

static uint16_t *narrowed(const float *x, int n) {
    uint16_t *y = malloc(sizeof *y * (size_t)(n + 8));
    CHECK(y != NULL);
    for (int i = 0; i < n + 8; i++)
        gradd_half_put(&y[i], half_type, x[i]);
    return y;
}

TEST(a_scan_finds_the_first_of_each) {
    float *x = numbers(MOST, 1);
    const struct {
        int nan, inf;
        bool negative;
    } cases[] = {
        {-1,       -1,       false},
        {70000,    MOST - 1, true },
        {3,        2,        false},
        {MOST - 1, 0,        true },
        {-1,       4097,     false}
    };
    EACH(o, orders) EACH(k, cases) {
        gradd_nonfinite_t found;
        float *y = memcpy(malloc(sizeof *y * MOST), x, sizeof *y * MOST);
        if (cases[k].nan >= 0) y[cases[k].nan] = y[MOST - 1] = NAN;
        if (cases[k].inf >= 0) y[cases[k].inf] = cases[k].negative ? -INFINITY : INFINITY;
        const gradd_view_t v = {
            {GRADD_DT_F32, 1, {MOST}},
            y
        };
        emu_set_order(orders[o]);
        CHECK_OK(emu_here.find_nonfinite(NULL, &v, &found));
        CHECK_EQ_INT(found.nan, cases[k].nan);
        CHECK_EQ_INT(found.inf, cases[k].inf);
        if (cases[k].inf >= 0) CHECK(found.negative == cases[k].negative);
        free(y);
    }
    free(x);
}

TEST_LIMIT(fingerprints_are_the_cpus, 60) {
    float *x = numbers(MOST, 2);
    gradd_bytes_t list[sizeof sizes / sizeof sizes[0] + 2];
    int n = 0;
    EACH(i, sizes) list[n++] = (gradd_bytes_t){x, (size_t)sizes[i]};
    list[n++] = (gradd_bytes_t){(const char *)x + 3, 4 * MOST - 100}; /* at an odd address */
    list[n++] = (gradd_bytes_t){x, 4 * MOST};
    EACH(o, orders)
    for (int whole = 0; whole < 2; whole++)
        for (int some = 0; some <= n; some += 4) {
            uint64_t ours, cpu;
            emu_set_order(orders[o]);
            CHECK_OK(emu_here.fingerprint(NULL, list, some, whole, &ours));
            CHECK_OK(gradd_backend_cpu.fingerprint(NULL, list, some, whole, &cpu));
            CHECK(ours == cpu);
        }
    free(x);
}

static void check_norm(void) {
    float *x = numbers(MOST, 3);
    uint16_t *half = narrowed(x, MOST);
    const gradd_span_t list[] = {
        {x,     GRADD_DT_F32, 70001},
        {half,  half_type,    MOST },
        {x,     GRADD_DT_F32, 0    },
        {x + 1, GRADD_DT_F32, 3    }
    };
    double cpu;
    CHECK_OK(gradd_backend_cpu.norm2(NULL, list, 4, &cpu));
    EACH(o, orders) {
        double ours;
        emu_set_order(orders[o]);
        CHECK_OK(emu_here.norm2(NULL, list, 4, &ours));
        CHECK(ours == cpu);
    }
    free(half);
    free(x);
}

TEST(a_norm_has_the_cpus_bits) {
    EACH(i, halves) {
        half_type = halves[i];
        check_norm();
    }
}

/* ---- Adam ---- */

typedef struct adam_s {
    float *p, *m, *v, *g, *out[3];
    uint16_t *p16, *g16;
} adam_t;

static adam_t make(int n) {
    adam_t a = {numbers(n, 4), numbers(n, 5), numbers(n, 6), numbers(n, 7), {0}, NULL, NULL};
    for (int i = 0; i < n + 8; i++)
        a.v[i] = fabsf(a.v[i]);
    a.p16 = narrowed(a.p, n);
    gradd_half_put(&a.p16[n / 2], half_type, 3); /* overwritten by other code */
    a.g16 = narrowed(a.g, n);
    for (int k = 0; k < 3; k++)
        a.out[k] = numbers(n, 8);
    return a;
}

static void drop(adam_t *a) {
    float *const all[] = {a->p, a->m, a->v, a->g, a->out[0], a->out[1], a->out[2]};
    EACH(i, all) free(all[i]);
    free(a->p16);
    free(a->g16);
}

static void check_span(const gradd_adam_t *h, int n, int kind, int off) {
    adam_t ours = make(n), cpu = make(n);
    gradd_adam_span_t s[2];
    for (int k = 0; k < 2; k++) {
        adam_t *a = k ? &cpu : &ours;
        s[k] = (gradd_adam_span_t){.m = a->m + off,
                                   .v = a->v + off,
                                   .out_p = a->out[0] + off,
                                   .out_m = a->out[1] + off,
                                   .out_v = a->out[2] + off,
                                   .n = n,
                                   .half = half_type};
        if (kind != 1) s[k].p = a->p + off; /* f32, a half, a half with masters */
        if (kind) s[k].p16 = a->p16 + off;
        if (kind) s[k].g16 = a->g16 + off;
        if (!kind) s[k].g = a->g + off;
    }
    CHECK_OK(emu_here.adam(NULL, h, 0.75f, &s[0]));
    CHECK_OK(gradd_backend_cpu.adam(NULL, h, 0.75f, &s[1]));
    for (int k = 0; k < 3; k++)
        CHECK(!memcmp(ours.out[k], cpu.out[k], sizeof(float) * (size_t)(n + 8)));
    drop(&ours);
    drop(&cpu);
}

TEST_LIMIT(adam_gives_the_cpus_bits, 60) {
    EACH(at, halves) for (int mode = 0; mode < 3; mode++) {
        half_type = halves[at];
        const gradd_adam_t h = {1e-2, 0.9, 0.99, 1e-6, 0.1, (gradd_adam_mode_t)mode, mode != 1, 3};
        EACH(i, sizes) for (int kind = 0; kind < 3; kind++) if (sizes[i] <= 5000) {
            emu_set_order(orders[i % 3]);
            check_span(&h, sizes[i], kind, 0);
            check_span(&h, sizes[i], kind, 1);
        }
    }
}

static void check_commit(gradd_dtype_t type) {
    enum { N = 3001 };
    half_type = type;
    adam_t ours = make(N), cpu = make(N);
    uint64_t word = 0;
    for (int half = 0; half < 2; half++)
        for (int master = 0; master < 2; master++) {
            const adam_t *both[] = {&ours, &cpu};
            EACH(k, both) {
                const adam_t *a = both[k];
                const gradd_adam_commit_t c = {.p = a->g,
                                               .m = a->m,
                                               .v = a->v,
                                               .out_p = half ? (void *)a->p16 : a->out[0],
                                               .dtype = half ? type : GRADD_DT_F32,
                                               .out_master = master ? a->p : NULL,
                                               .out_m = a->out[1],
                                               .out_v = a->out[2],
                                               .n = N};
                CHECK_OK((k ? &gradd_backend_cpu : &emu_here)->adam_commit(NULL, &c));
            }
            for (int k = 0; k < 3; k++)
                CHECK(!memcmp(ours.out[k], cpu.out[k], sizeof(float) * N));
            CHECK(!memcmp(ours.p16, cpu.p16, sizeof(uint16_t) * N));
            CHECK(!memcmp(ours.p, cpu.p, sizeof(float) * N));
        }
    CHECK_OK(emu_here.store(NULL, &word, UINT64_C(0x123456789abcdef)));
    CHECK(word == UINT64_C(0x123456789abcdef));
    drop(&ours);
    drop(&cpu);
}

TEST(a_commit_and_a_word) {
    EACH(i, halves) check_commit(halves[i]);
}

TEST(touched_rows_are_the_cpus) {
    enum { ROWS = 1003 };
    static const int widths[] = {1, 5, 32, 100};
    EACH(w, widths) for (int half = 0; half < 2; half++) {
        const int width = widths[w], n = ROWS * width;
        float *x = calloc((size_t)n + 8, sizeof *x);
        uint64_t ours[ROWS / 64 + 1], cpu[ROWS / 64 + 1];
        CHECK(x != NULL);
        for (int r = 0; r < ROWS; r++)
            x[r * width + r % width] = r % 3 ? -0.0f : r % 2 ? NAN : 1e-30f;
        half_type = halves[w % 2];
        uint16_t *x16 = narrowed(x, n);
        const gradd_span_t s = {half ? (void *)x16 : x, half ? half_type : GRADD_DT_F32, n};
        emu_set_order(orders[w % 3]);
        CHECK_OK(emu_here.touched(NULL, &s, width, ours));
        CHECK_OK(gradd_backend_cpu.touched(NULL, &s, width, cpu));
        CHECK(!memcmp(ours, cpu, sizeof ours));
        free(x16);
        free(x);
    }
}
