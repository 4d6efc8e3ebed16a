/* The optimizer step: its mathematics in the three modes, clipping, and the journal under kills at
 * every point where one could matter. */
#include "server/exec/step.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

#define N_SMALL 1000
#define N_LARGE ((int64_t)(STEP_CHUNK * 2 + 777))

/* Two parameters with state and gradients, and a journal, in memory that a fork shares. */
typedef struct world_s {
    step_tensor_t tensors[2];
    gradd_adam_t group;
    void *journal, *memory;
    size_t bytes;
} world_t;

static float pattern(int64_t i, int salt) {
    return (float)((i * 2654435761u + (uint64_t)salt * 97) % 1999) / 999.0f - 1.0f;
}

static void world_open(world_t *w, gradd_adam_mode_t mode) {
    int64_t sizes[2] = {N_SMALL, N_LARGE};
    w->bytes = STEP_JOURNAL_BYTES + 4 * sizeof(float) * (size_t)(N_SMALL + N_LARGE);
    w->memory = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(w->memory != MAP_FAILED);
    w->journal = w->memory;
    w->group = (gradd_adam_t){1e-2, 0.9, 0.999, 1e-6, 0.1, mode, true, 1};
    float *at = (float *)((char *)w->memory + STEP_JOURNAL_BYTES);
    for (int t = 0; t < 2; t++) {
        float *p = at, *m = p + sizes[t], *v = m + sizes[t], *g = v + sizes[t];
        for (int64_t i = 0; i < sizes[t]; i++) {
            p[i] = pattern(i, t);
            g[i] = pattern(i, t + 7);
        }
        w->tensors[t] = (step_tensor_t){p, m, v, g, sizes[t], 0};
        at = g + sizes[t];
    }
}

static void world_close(world_t *w) {
    munmap(w->memory, w->bytes);
}

static step_request_t request(world_t *w, uint64_t step, double max_norm) {
    w->group.step = (int64_t)step + 1;
    return (step_request_t){w->tensors, 2, &w->group, 1, max_norm, step, w->journal};
}

/* One element in double, written from the formulas of adamw.h. */
static void expected(const gradd_adam_t *h, double scale, double *p, double *m, double *v,
                     double g) {
    double bc1 = 1 - pow(h->beta1, (double)h->step), bc2 = 1 - pow(h->beta2, (double)h->step);
    g *= scale;
    if (h->mode == GRADD_ADAM_L2) g += h->weight_decay * *p;
    *m = h->beta1 * *m + (1 - h->beta1) * g;
    *v = h->beta2 * *v + (1 - h->beta2) * g * g;
    if (h->mode == GRADD_ADAMW_TORCH) {
        *p *= 1 - h->lr * h->weight_decay;
        *p -= h->lr / bc1 * *m / (sqrt(*v) / sqrt(bc2) + h->eps);
        return;
    }
    *p -= h->lr * sqrt(bc2) / bc1 * *m / (sqrt(*v) + h->eps);
    if (h->mode == GRADD_ADAMW_TRANSFORMERS) *p *= 1 - h->lr * h->weight_decay;
}

static void check_mode(gradd_adam_mode_t mode, double max_norm) {
    world_t w;
    world_open(&w, mode);
    double sum = 0, p[N_SMALL], m[N_SMALL] = {0}, v[N_SMALL] = {0};
    for (int t = 0; t < 2; t++)
        for (int64_t i = 0; i < w.tensors[t].n; i++)
            sum += (double)w.tensors[t].g[i] * w.tensors[t].g[i];
    double norm = sqrt(sum), scale = max_norm > 0 ? fmin(1, max_norm / (norm + 1e-6)) : 1;
    for (int i = 0; i < N_SMALL; i++)
        p[i] = w.tensors[0].p[i];
    for (uint64_t step = 0; step < 5; step++) {
        step_request_t r = request(&w, step, max_norm);
        double got;
        CHECK_OK(step_run(&r, &got));
        if (max_norm > 0) CHECK_NEAR(got, norm, 1e-9 * norm);
        for (int i = 0; i < N_SMALL; i++) {
            expected(&w.group, scale, &p[i], &m[i], &v[i], w.tensors[0].g[i]);
            CHECK_NEAR(w.tensors[0].p[i], p[i], 2e-6);
            CHECK_NEAR(w.tensors[0].m[i], m[i], 1e-6);
        }
    }
    world_close(&w);
}

TEST(l2_mode_matches_formulas) {
    check_mode(GRADD_ADAM_L2, 0);
}

TEST(transformers_mode_matches_formulas) {
    check_mode(GRADD_ADAMW_TRANSFORMERS, 0);
}

TEST(torch_mode_matches_formulas) {
    check_mode(GRADD_ADAMW_TORCH, 0);
}

TEST(gradients_are_clipped_by_their_global_norm) {
    check_mode(GRADD_ADAMW_TORCH, 1.5);
}

TEST(parameters_without_gradient_are_left_alone) {
    world_t w;
    world_open(&w, GRADD_ADAMW_TORCH);
    w.tensors[0].g = NULL;
    float before = w.tensors[0].p[3], other = w.tensors[1].p[3];
    step_request_t r = request(&w, 0, 0);
    double norm;
    CHECK_OK(step_run(&r, &norm));
    CHECK(w.tensors[0].p[3] == before && w.tensors[1].p[3] != other);
    world_close(&w);
}

TEST(repeated_step_changes_nothing) {
    world_t w;
    world_open(&w, GRADD_ADAMW_TORCH);
    double norm, again;
    step_request_t r = request(&w, 0, 1);
    CHECK_OK(step_run(&r, &norm));
    float p = w.tensors[1].p[N_LARGE - 1];
    CHECK_OK(step_run(&r, &again));
    CHECK(w.tensors[1].p[N_LARGE - 1] == p && norm == again);
    step_request_t skipped = request(&w, 5, 1);
    CHECK_STATUS(GRADD_E_STALE, step_run(&skipped, &norm));
    CHECK_ERROR_HAS("the journal is at step 1");
    world_close(&w);
}

TEST(foreign_memory_is_no_journal) {
    world_t w;
    world_open(&w, GRADD_ADAMW_TORCH);
    memset(w.journal, 0x5a, 64);
    double norm;
    step_request_t r = request(&w, 0, 0);
    CHECK_STATUS(GRADD_E_SHM, step_run(&r, &norm));
    world_close(&w);
}

/* ---- kills --------------------------------------------------------------------------------------
 */

static int points_left;

static void die_at_point(void) {
    if (points_left-- == 0) kill(getpid(), SIGKILL);
}

/* Runs `steps` steps in children that die at the given point counted from each start; returns the
 * number of deaths. point < 0: nobody dies. */
static int run_with_deaths(world_t *w, int steps, int point) {
    int deaths = 0;
    for (int step = 0; step < steps;) {
        pid_t child = fork();
        if (!child) {
            points_left = deaths ? 1 << 30 : point; /* the first child dies, the next finishes */
            step_crash_point = point < 0 ? NULL : die_at_point;
            step_request_t r = request(w, (uint64_t)step, 1);
            double norm;
            _exit(step_run(&r, &norm) ? 1 : 0);
        }
        int status;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) {
            deaths++;
            continue;
        }
        CHECK_EQ_INT(WEXITSTATUS(status), 0);
        step++;
    }
    return deaths;
}

static bool same_parameters(const world_t *a, const world_t *b) {
    for (int t = 0; t < 2; t++) {
        size_t bytes = sizeof(float) * (size_t)a->tensors[t].n;
        if (memcmp(a->tensors[t].p, b->tensors[t].p, bytes) ||
            memcmp(a->tensors[t].m, b->tensors[t].m, bytes) ||
            memcmp(a->tensors[t].v, b->tensors[t].v, bytes))
            return false;
    }
    return true;
}

TEST_LIMIT(kill_at_every_point_loses_no_bit, 60) {
    world_t whole;
    world_open(&whole, GRADD_ADAMW_TORCH);
    CHECK_EQ_INT(run_with_deaths(&whole, 2, -1), 0);
    int point = 0, deaths = 1;
    for (; deaths; point++) {
        world_t w;
        world_open(&w, GRADD_ADAMW_TORCH);
        deaths = run_with_deaths(&w, 2, point);
        CHECK(same_parameters(&whole, &w));
        world_close(&w);
    }
    CHECK(point > 12); /* every chunk has several points */
    world_close(&whole);
}

TEST_LIMIT(kill_at_random_times_loses_no_bit, 60) {
    world_t whole, w;
    world_open(&whole, GRADD_ADAMW_TRANSFORMERS);
    world_open(&w, GRADD_ADAMW_TRANSFORMERS);
    const int steps = 40;
    run_with_deaths(&whole, steps, -1);
    unsigned random = 12345;
    int deaths = 0;
    for (;;) {
        uint64_t now = ((step_journal_t *)w.journal)->progress >> 24;
        if (now >= (uint64_t)steps) break;
        pid_t child = fork();
        if (!child) {
            for (uint64_t k = now; k < (uint64_t)steps; k++) {
                step_request_t r = request(&w, k, 1);
                double norm;
                if (step_run(&r, &norm)) _exit(1);
            }
            _exit(0);
        }
        usleep((rand_r(&random) % 4000) + 500);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        deaths += WIFSIGNALED(status) != 0;
    }
    CHECK(deaths > 0);
    CHECK(same_parameters(&whole, &w));
}
