/* Tests of the random operators beyond their cases: rate, independence of threads, the run flag,
 * agreement of forward and backward masks, moments of the normal and uniform numbers. */
#include "tests/c/eager.h"
#include "tests/test.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"

enum { N = 200000 };

typedef struct dropout_trial_s {
    const char *op;
    float ratio;
    uint64_t seed, node;
    bool off, has_node;
    int64_t node_attr;
} dropout_trial_t;

static float *ones(void) {
    float *x = malloc(sizeof *x * N);
    for (int i = 0; i < N; i++)
        x[i] = 1;
    return x;
}

static void run(const dropout_trial_t *c, const float *x, float *y, uint8_t *mask) {
    float ratio = c->ratio;
    uint8_t training = 1;
    gradd_attr_t attr = {.name = "node", .kind = GRADD_ATTR_INT, .i = c->node_attr};
    gradd_type_t flat = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {N}};
    gradd_view_t in[3] = {
        {flat,                     (void *)x},
        {{.dtype = GRADD_DT_F32},  &ratio   },
        {{.dtype = GRADD_DT_BOOL}, &training}
    };
    gradd_view_t out[2] = {
        {flat, y   },
        {flat, mask}
    };
    out[1].type.dtype = GRADD_DT_BOOL;
    const gradd_op_t *op = gradd_op_by_name(c->op);
    bool random = strncmp(c->op, "Dropout", 7) != 0;
    gradd_launch_t r = {
        .op = op,
        .attrs = {&attr, c->has_node ? 1 : 0},
        .opset = 20,
        .n_in = random ? 1 : 3,
        .n_out = mask ? 2 : 1,
        .in = in,
        .out = out,
        .seed = c->seed,
        .node = c->node,
        .dropout_off = c->off
    };
    CHECK_OK(eager_launch(&r));
}

TEST(rate_and_scale_are_as_asked) {
    static const float ratios[] = {0.1f, 0.5f, 0.9f};
    float *x = ones(), *y = malloc(sizeof *y * N);
    for (int k = 0; k < 3; k++) {
        int kept = 0;
        run(&(dropout_trial_t){.op = "Dropout", .ratio = ratios[k], .seed = 11, .node = 3}, x, y,
            NULL);
        for (int i = 0; i < N; i++) {
            if (y[i] == 0) continue;
            kept++;
            CHECK_NEAR(y[i], 1 / (1 - ratios[k]), 1e-5);
        }
        /* five standard deviations of a binomial count */
        CHECK_NEAR(kept, N * (1 - ratios[k]), 5 * sqrt(N * ratios[k] * (1 - ratios[k])));
    }
    free(x), free(y);
}

TEST(mask_is_a_function_of_the_coordinates) {
    float *x = ones(), *a = malloc(sizeof *a * N), *b = malloc(sizeof *b * N);
    dropout_trial_t c = {.op = "Dropout", .ratio = 0.3f, .seed = 5, .node = 9};
    omp_set_num_threads(1);
    run(&c, x, a, NULL);
    for (int threads = 2; threads <= 5; threads++) {
        omp_set_num_threads(threads);
        run(&c, x, b, NULL);
        CHECK_EQ_INT(memcmp(a, b, sizeof *a * N), 0);
    }
    for (int other = 0; other < 2; other++) {
        dropout_trial_t d = c;
        if (other)
            d.node++;
        else
            d.seed++;
        int same = 0;
        run(&d, x, b, NULL);
        for (int i = 0; i < N; i++)
            same += a[i] == b[i];
        CHECK_NEAR(same, 0.58 * N, 2000); /* 0.7 * 0.7 + 0.3 * 0.3 */
    }
    free(x), free(a), free(b);
}

TEST(backward_uses_the_mask_of_forward) {
    float *x = ones(), *y = malloc(sizeof *y * N), *dx = malloc(sizeof *dx * N);
    uint8_t *mask = malloc(N);
    run(&(dropout_trial_t){.op = "Dropout", .ratio = 0.2f, .seed = 5, .node = 77}, x, y, mask);
    dropout_trial_t back = {
        .op = "DropoutGrad", .ratio = 0.2f, .seed = 5, .node = 500, .has_node = true};
    back.node_attr = 77;
    run(&back, x, dx, NULL);
    CHECK_EQ_INT(memcmp(y, dx, sizeof *y * N), 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ_INT(mask[i], y[i] != 0);
    free(x), free(y), free(dx), free(mask);
}

TEST(flag_switches_masking_off) {
    float *x = ones(), *y = malloc(sizeof *y * N);
    uint8_t *mask = malloc(N);
    dropout_trial_t c = {.op = "Dropout", .ratio = 0.5f, .seed = 5, .node = 9, .off = true};
    run(&c, x, y, mask);
    CHECK_EQ_INT(memcmp(x, y, sizeof *x * N), 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ_INT(mask[i], 1);
    c.op = "DropoutGrad", c.has_node = true;
    run(&c, x, y, NULL);
    CHECK_EQ_INT(memcmp(x, y, sizeof *x * N), 0);
    free(x), free(y), free(mask);
}

TEST(normal_and_uniform_have_their_moments) {
    float *x = ones(), *y = malloc(sizeof *y * N);
    double sum[3] = {0};
    run(&(dropout_trial_t){.op = "RandomNormalLike", .seed = 1, .node = 2}, x, y, NULL);
    for (int i = 0; i < N; i++)
        sum[0] += y[i], sum[1] += (double)y[i] * y[i], sum[2] += pow(y[i], 4);
    CHECK_NEAR(sum[0] / N, 0, 0.012);
    CHECK_NEAR(sum[1] / N, 1, 0.02);
    CHECK_NEAR(sum[2] / N, 3, 0.15);
    run(&(dropout_trial_t){.op = "RandomUniformLike", .seed = 1, .node = 2}, x, y, NULL);
    sum[0] = 0;
    for (int i = 0; i < N; i++) {
        CHECK(y[i] >= 0 && y[i] < 1);
        sum[0] += y[i];
    }
    CHECK_NEAR(sum[0] / N, 0.5, 0.004);
    free(x), free(y);
}

TEST(bernoulli_has_its_rate_per_element) {
    float *x = ones(), *y = malloc(sizeof *y * N);
    int drawn[2] = {0};
    for (int i = 0; i < N; i++)
        x[i] = i % 2 ? 0.8f : 0.1f;
    run(&(dropout_trial_t){.op = "Bernoulli", .seed = 3, .node = 2}, x, y, NULL);
    for (int i = 0; i < N; i++) {
        CHECK(y[i] == 0 || y[i] == 1);
        drawn[i % 2] += y[i] == 1;
    }
    /* five standard deviations of a binomial count */
    CHECK_NEAR(drawn[0], N / 2 * 0.1, 5 * sqrt(N / 2 * 0.1 * 0.9));
    CHECK_NEAR(drawn[1], N / 2 * 0.8, 5 * sqrt(N / 2 * 0.8 * 0.2));
    free(x), free(y);
}

TEST(flag_holds_other_random_numbers_still) {
    static const char *const ops[] = {"RandomNormalLike", "RandomUniformLike", "Bernoulli"};
    float *x = ones(), *y = malloc(sizeof *y * N);
    for (int i = 0; i < N; i++)
        x[i] = i % 2 ? 0.8f : 0.1f;
    for (int k = 0; k < 3; k++) {
        run(&(dropout_trial_t){.op = ops[k], .seed = 3, .node = 2, .off = true}, x, y, NULL);
        for (int i = 0; i < N; i++)
            CHECK_EQ_INT(y[i] == (k < 2 ? 0.5f : (float)(i % 2)), 1);
    }
    free(x), free(y);
}
