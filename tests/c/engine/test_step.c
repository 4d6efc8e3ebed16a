/* The optimizer step: its mathematics in the three modes, clipping, parameters in f32, in bf16 or
 * f16, and in these with master weights, and the journal under kills at every point where one could
 * matter.
 */
#include "server/exec/step.h"

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/adamw.h"
#include "kernels/cpu/half.h"
#include "tests/c/step_fixture.h"
#include "tests/fake/fake.h"
#include "tests/test.h"

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

static double all_squares(const fixture_t *w) {
    double sum = 0;
    for (int t = 0; t < 2; t++)
        for (int64_t i = 0; i < w->tensors[t].n; i++)
            sum += (double)gradient(w, t, i) * gradient(w, t, i);
    return sum;
}

/* Five steps of the small tensor. Without masters a half parameter is rounded after each step, with
 * masters it is what they round to. */
static void check_stored(gradd_adam_mode_t mode, double max_norm, storage_t storage) {
    fixture_t w;
    fixture_open_as(&w, mode, storage);
    double p[N_SMALL], m[N_SMALL] = {0}, v[N_SMALL] = {0};
    double norm = sqrt(all_squares(&w)), scale = fmin(1, max_norm / (norm + 1e-6));
    const step_tensor_t *t = &w.tensors[0];
    for (int i = 0; i < N_SMALL; i++)
        p[i] = parameter(&w, 0, i);
    for (uint64_t step = 0; step < 5; step++) {
        step_request_t r = request(&w, step, max_norm);
        double got;
        CHECK_OK(run(&r, &got));
        if (max_norm > 0) CHECK_NEAR(got, norm, 1e-9 * norm);
        for (int i = 0; i < N_SMALL; i++) {
            expected(&w.group, max_norm > 0 ? scale : 1, &p[i], &m[i], &v[i], gradient(&w, 0, i));
            float now = parameter(&w, 0, i);
            if (storage == MASTERS) CHECK(now == rounded(t->master[i]));
            CHECK_NEAR(storage == MASTERS ? t->master[i] : now, p[i],
                       storage == HALF ? 0.0040 * fabs(p[i]) : 2e-6);
            CHECK_NEAR(t->m[i], m[i], 1e-6);
            if (storage == HALF) p[i] = now; /* its own rounding does not add up here */
        }
    }
    fixture_close(&w);
}

static void check_mode(gradd_adam_mode_t mode, double max_norm) {
    check_stored(mode, max_norm, F32);
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

TEST(half_parameters_are_rounded_after_every_step) {
    for (int i = 0; i < 2; i++) {
        half = halves[i];
        check_stored(GRADD_ADAM_L2, 0, HALF);
        check_stored(GRADD_ADAMW_TRANSFORMERS, 0, HALF);
        check_stored(GRADD_ADAMW_TORCH, 1.5, HALF);
    }
}

TEST(master_weights_keep_what_rounding_loses) {
    for (int i = 0; i < 2; i++) {
        half = halves[i];
        check_stored(GRADD_ADAM_L2, 0, MASTERS);
        check_stored(GRADD_ADAMW_TRANSFORMERS, 0, MASTERS);
        check_stored(GRADD_ADAMW_TORCH, 1.5, MASTERS);
    }
}

/* 1.0 minus steps of 2^-10: half the distance to the next bf16 number below is 2^-9. */
TEST(steps_below_the_last_place_add_up_only_with_masters) {
    for (storage_t storage = HALF; storage <= MASTERS; storage++) {
        fixture_t w;
        fixture_open_as(&w, GRADD_ADAMW_TORCH, storage);
        step_tensor_t *t = &w.tensors[0];
        write_at(t->dtype, t->p, 7, 1);
        write_at(t->dtype, (void *)t->g, 7, 1);
        if (t->master) t->master[7] = 1;
        w.group.weight_decay = 0;
        w.group.lr = 0x1p-10;
        for (uint64_t step = 0; step < 8; step++) {
            step_request_t r = request(&w, step, 0);
            double norm;
            CHECK_OK(run(&r, &norm));
        }
        CHECK_NEAR(parameter(&w, 0, 7), storage == MASTERS ? 1 - 0x1p-7 : 1, 0);
        fixture_close(&w);
    }
}

TEST(a_parameter_that_was_written_counts_more_than_its_master) {
    fixture_t w;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, MASTERS);
    step_tensor_t *t = &w.tensors[0];
    t->master[3] = rounded(t->master[3]) * 1.0009765625f; /* rounds to p: counts */
    float kept = t->master[3], written = 42;
    CHECK(rounded(kept) == parameter(&w, 0, 3) && rounded(kept) != kept);
    write_at(t->dtype, t->p, 4, written); /* as load_state_dict would */
    double p[2] = {kept, written};
    step_request_t r = request(&w, 0, 0);
    double norm;
    CHECK_OK(run(&r, &norm));
    for (int i = 0; i < 2; i++) {
        double m = 0, v = 0;
        expected(&w.group, 1, &p[i], &m, &v, gradient(&w, 0, 3 + i));
        CHECK_NEAR(t->master[3 + i], p[i], 2e-6 * fabs(p[i]));
    }
    fixture_close(&w);
}

TEST(norm_of_half_gradients_is_that_of_their_values) {
    for (int i = 0; i < 2; i++) {
        fixture_t w;
        half = halves[i];
        fixture_open_as(&w, GRADD_ADAMW_TORCH, HALF);
        float *wide = malloc(sizeof *wide * (size_t)N_LARGE);
        gradd_half_widen(wide, w.tensors[1].g, half, N_LARGE);
        const gradd_span_t f32 = {wide, GRADD_DT_F32, N_LARGE};
        const gradd_span_t narrow = {w.tensors[1].g, half, N_LARGE};
        CHECK(gradd_sum_squares(&f32, 1) == gradd_sum_squares(&narrow, 1));
        free(wide);
        fixture_close(&w);
    }
}

/* Five steps, of which rows without a gradient know nothing; the others are those of a step of all.
 */
static void check_rows(gradd_adam_mode_t mode, storage_t storage) {
    fixture_t w, dense;
    fixture_open_as(&w, mode, storage | ROWS);
    fixture_open_as(&dense, mode, storage | ROWS);
    for (int i = 0; i < 2; i++) {
        dense.tensors[i].width = 0;
        for (int64_t k = 0; k < w.tensors[i].n; k++) /* as if there had been steps before */
            w.tensors[i].m[k] = dense.tensors[i].m[k] = pattern(k, 5),
            w.tensors[i].v[k] = dense.tensors[i].v[k] = fabsf(pattern(k, 6));
    }
    for (uint64_t step = 0; step < 5; step++) {
        double norm, all;
        step_request_t r = request(&w, step, 1.5), d = request(&dense, step, 1.5);
        CHECK_OK(run(&r, &norm));
        CHECK_OK(run(&d, &all));
        CHECK(norm == all && norm > 1.5);
    }
    for (int i = 0; i < 2; i++) {
        const step_tensor_t *t = &w.tensors[i], *whole = &dense.tensors[i];
        for (int64_t k = 0; k < t->n; k++) {
            const bool touched = is_touched(i, k / t->width);
            CHECK(t->m[k] == (touched ? whole->m[k] : pattern(k, 5)));
            CHECK(t->v[k] == (touched ? whole->v[k] : fabsf(pattern(k, 6))));
            const float start = t->dtype == half ? rounded(pattern(k, i)) : pattern(k, i);
            CHECK(parameter(&w, i, k) == (touched ? parameter(&dense, i, k) : start));
            if (t->master) CHECK(t->master[k] == (touched ? whole->master[k] : start));
        }
    }
    fixture_close(&w), fixture_close(&dense);
}

TEST(rows_without_a_gradient_stay_as_they_are) {
    check_rows(GRADD_ADAM_L2, F32);
    for (int i = 0; i < 2; i++) {
        half = halves[i];
        check_rows(GRADD_ADAMW_TRANSFORMERS, HALF);
        check_rows(GRADD_ADAMW_TORCH, MASTERS);
    }
}

TEST(rows_that_do_not_fit_are_refused) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    double norm;
    step_request_t r = request(&w, 0, 0);
    w.tensors[1].width = 7;
    CHECK_STATUS(GRADD_E_TENSOR, run(&r, &norm));
    CHECK_ERROR_HAS("parameter 1: 262921 elements in rows of 7");
    w.tensors[1].width = -1;
    CHECK_STATUS(GRADD_E_TENSOR, run(&r, &norm));
    w.tensors[1].width = N_LARGE;
    CHECK_STATUS(GRADD_E_LIMIT, run(&r, &norm));
    CHECK_ERROR_HAS("parameter 1: rows of 262921 elements, expected at most 131072");
    fixture_close(&w);
}

/* The writer of a journal may have written anything. */
TEST(rows_of_a_foreign_journal_stay_within_the_chunk) {
    fixture_t w;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, F32 | ROWS);
    double norm;
    step_request_t r = request(&w, 0, 0);
    CHECK_OK(run(&r, &norm));
    step_journal_t *journal = w.journal;
    memset(journal->rows, 0xff, sizeof journal->rows);
    journal->progress = 0; /* as if the step had been interrupted in its first chunk */
    journal->sealed = 0;
    CHECK_OK(run(&r, &norm));
    CHECK_EQ_INT((int64_t)(journal->progress >> 24), 1);
    fixture_close(&w);
}

TEST(other_element_types_are_refused) {
    fixture_t w;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, MASTERS);
    double norm;
    w.tensors[1].dtype = GRADD_DT_F32;
    step_request_t r = request(&w, 0, 0);
    CHECK_STATUS(GRADD_E_TENSOR, run(&r, &norm));
    CHECK_ERROR_HAS("parameter 1: f32 has no master weights");
    w.tensors[1].dtype = GRADD_DT_F64;
    CHECK_STATUS(GRADD_E_TENSOR, run(&r, &norm));
    CHECK_ERROR_HAS("parameter 1: neither f32 nor bf16 nor f16");
    fixture_close(&w);
}

TEST(parameters_without_gradient_are_left_alone) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    w.tensors[0].g = NULL;
    float before = parameter(&w, 0, 3), other = parameter(&w, 1, 3);
    step_request_t r = request(&w, 0, 0);
    double norm;
    CHECK_OK(run(&r, &norm));
    CHECK(parameter(&w, 0, 3) == before && parameter(&w, 1, 3) != other);
    fixture_close(&w);
}

TEST(repeated_step_changes_nothing) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    double norm, again;
    step_request_t r = request(&w, 0, 1);
    CHECK_OK(run(&r, &norm));
    float p = parameter(&w, 1, N_LARGE - 1);
    CHECK_OK(run(&r, &again));
    CHECK(parameter(&w, 1, N_LARGE - 1) == p && norm == again);
    step_request_t skipped = request(&w, 5, 1);
    CHECK_STATUS(GRADD_E_STALE, run(&skipped, &norm));
    CHECK_ERROR_HAS("the journal is at step 1");
    fixture_close(&w);
}

/* A client that has lost the reply sends the same request again; a new one must not pass for it. */
TEST(another_request_of_a_finished_step_is_refused) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    double norm;
    step_request_t r = request(&w, 0, 1);
    CHECK_OK(run(&r, &norm));
    float p = parameter(&w, 1, 5);
    r.once++;
    CHECK_STATUS(GRADD_E_STALE, run(&r, &norm));
    CHECK_ERROR_HAS("step 0 was finished by another request");
    r.once--;
    w.group.lr *= 2;
    CHECK_STATUS(GRADD_E_STALE, run(&r, &norm));
    w.group.lr /= 2;
    CHECK_OK(run(&r, &norm));
    CHECK(parameter(&w, 1, 5) == p);
    r.step = 1;
    r.once++;
    CHECK_OK(run(&r, &norm));
    CHECK(parameter(&w, 1, 5) != p);
    fixture_close(&w);
}

TEST(foreign_memory_is_no_journal) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    memset(w.journal, 0x5a, 64);
    double norm;
    step_request_t r = request(&w, 0, 0);
    CHECK_STATUS(GRADD_E_SHM, run(&r, &norm));
    fixture_close(&w);
}

/* ---- order ----------------------------------------------------------------------------------- */

static gradd_device_t *open_fake(void) {
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *device;
    CHECK_OK(device_open(&gradd_backend_fake, &o, &device));
    return device;
}

static gradd_device_t *open_cpu(void) {
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *device;
    CHECK_OK(device_open(&gradd_backend_cpu, &o, &device));
    return device;
}

TEST(a_device_that_works_later_leaves_the_same_bits) {
    gradd_device_t *fake = open_fake(), *cpu = open_cpu();
    for (storage_t storage = F32; storage <= (MASTERS | ROWS); storage++) {
        if ((storage & ~(unsigned)ROWS) > MASTERS) continue;
        fixture_t now, late;
        fixture_open_as(&now, GRADD_ADAMW_TORCH, storage);
        fixture_open_as(&late, GRADD_ADAMW_TORCH, storage);
        for (uint64_t step = 0; step < 3; step++) {
            double a, b;
            step_request_t r = request(&now, step, 1), s = request(&late, step, 1);
            CHECK_OK(run_on(cpu, &r, &a));
            CHECK_OK(run_on(fake, &s, &b));
            CHECK(a == b);
            CHECK_EQ_INT(fake_pending(fake->queue), 0);
        }
        CHECK(same_parameters(&now, &late));
        CHECK(!memcmp(now.journal, late.journal, sizeof(step_journal_t)));
        fixture_close(&now), fixture_close(&late);
    }
    gradd_device_close(fake), gradd_device_close(cpu);
}

/* A caller that is told that a step is refused may reuse its memory. */
TEST(nothing_is_under_way_after_a_step_is_refused) {
    gradd_device_t *fake = open_fake();
    fixture_t w;
    double norm;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    step_request_t r = request(&w, 5, 1); /* the journal is new, which is written down first */
    CHECK_STATUS(GRADD_E_STALE, run_on(fake, &r, &norm));
    CHECK_EQ_INT(fake_pending(fake->queue), 0);
    fixture_close(&w);
    gradd_device_close(fake);
}

/* Wherever the device is lost, another one finishes the step with the same bits. */
static void lose_at_every_point(storage_t storage, bool finish_late) {
    fixture_t whole;
    fixture_open_as(&whole, GRADD_ADAMW_TORCH, storage);
    step_request_t r = request(&whole, 0, 1);
    double norm, again;
    CHECK_OK(run(&r, &norm));
    for (int n = 1, lost = 1; lost; n++) {
        fixture_t w;
        gradd_device_t *fake = open_fake();
        fixture_open_as(&w, GRADD_ADAMW_TORCH, storage);
        fake_fail(fake->queue, FAKE_ITEM, n);
        r = request(&w, 0, 1);
        gradd_status_t status = run_on(fake, &r, &again);
        lost = status == GRADD_E_DEVICE;
        if (!lost) CHECK_OK(status);
        if (!lost) CHECK(n > 12);
        gradd_device_close(fake);
        gradd_device_t *next = finish_late ? open_fake() : open_on(tested_backend());
        if (lost) CHECK_OK(run_on(next, &r, &again));
        gradd_device_close(next);
        CHECK(again == norm);
        CHECK(same_parameters(&whole, &w));
        fixture_close(&w);
    }
    fixture_close(&whole);
}

TEST_LIMIT(a_device_that_is_lost_loses_no_bit, 60) {
    lose_at_every_point(F32, false);
}

/* The next one reads from the journal which rows were new, and waits for that. */
TEST_LIMIT(a_device_that_is_lost_loses_no_row, 60) {
    lose_at_every_point(F32 | ROWS, true);
}

TEST_LIMIT(a_device_that_is_lost_loses_no_long_chunk, 60) {
    chunk = 2 * STEP_CHUNK;
    lose_at_every_point(HALF, true);
    lose_at_every_point(MASTERS | ROWS, true);
}

/* ---- kills ----------------------------------------------------------------------------------- */

static int points_left;

static const gradd_backend_t *living;
static bool settles; /* before it dies, the device does all that it was asked */

/* In front of everything that the step asks of the device. */
static void point(gradd_queue_t *queue) {
    if (points_left-- != 0) return;
    if (settles) living->wait(queue, NULL);
    kill(getpid(), SIGKILL);
}

static gradd_status_t mortal_adam(gradd_queue_t *queue, const gradd_adam_t *hyper, float scale,
                                  const gradd_adam_span_t *span) {
    point(queue);
    return living->adam(queue, hyper, scale, span);
}

static gradd_status_t mortal_commit(gradd_queue_t *queue, const gradd_adam_commit_t *commit) {
    point(queue);
    return living->adam_commit(queue, commit);
}

static gradd_status_t mortal_store(gradd_queue_t *queue, uint64_t *word, uint64_t value) {
    point(queue);
    return living->store(queue, word, value);
}

/* Runs the step and dies at the given point. */
static gradd_status_t run_mortal(const step_request_t *r, int at) {
    static gradd_backend_t mortal;
    living = tested_backend();
    mortal = *living;
    double norm;
    mortal.adam = mortal_adam;
    mortal.adam_commit = mortal_commit;
    mortal.store = mortal_store;
    points_left = at;
    return run_on(open_on(&mortal), r, &norm);
}

/* Runs `steps` steps in children that die at the given point counted from each start; returns the
 * number of deaths. at < 0: no child dies. */
static int run_with_deaths(fixture_t *w, int steps, int at) {
    int deaths = 0;
    for (int step = 0; step < steps;) {
        pid_t child = fork();
        if (!child) {
            step_request_t r = request(w, (uint64_t)step, 1);
            /* the first child dies, the next finishes */
            _exit(run_mortal(&r, deaths || at < 0 ? INT_MAX : at) ? 1 : 0);
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

static void kill_at_every_point(storage_t storage, bool settled) {
    fixture_t whole;
    settles = settled;
    fixture_open_as(&whole, GRADD_ADAMW_TORCH, storage);
    CHECK_EQ_INT(run_with_deaths(&whole, 2, -1), 0);
    int at = 0, deaths = 1;
    for (; deaths; at++) {
        fixture_t w;
        fixture_open_as(&w, GRADD_ADAMW_TORCH, storage);
        deaths = run_with_deaths(&w, 2, at);
        CHECK(same_parameters(&whole, &w));
        fixture_close(&w);
    }
    CHECK(at > 12); /* every chunk has several points */
    fixture_close(&whole);
}

/* Half a step is finished by the same request only, whatever else is equal. */
TEST(another_request_does_not_finish_half_a_step) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    pid_t child = fork();
    step_request_t r = request(&w, 0, 1);
    double norm;
    settles = true;
    if (!child) _exit(run_mortal(&r, 9) ? 1 : 0); /* in the second chunk */
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    r.once++;
    CHECK_STATUS(GRADD_E_STALE, run(&r, &norm));
    CHECK_ERROR_HAS("step 0 was begun with other parameters, settings or gradients");
    r.once--;
    CHECK_OK(run(&r, &norm));
    fixture_close(&w);
}

TEST_LIMIT(kill_at_every_point_loses_no_bit, 60) {
    for (int settled = 0; settled <= !tested_backend()->host; settled++)
        kill_at_every_point(F32, settled);
}

/* A step that is skipped stays skipped, whichever process dies meanwhile. */
TEST(a_step_that_is_skipped_stays_so_under_kills) {
    fixture_t w, start;
    fixture_open(&w, GRADD_ADAMW_TORCH), fixture_open(&start, GRADD_ADAMW_TORCH);
    write_at(GRADD_DT_F32, (void *)w.tensors[0].g, 3, NAN);
    step_request_t r = request(&w, 0, 1);
    int deaths = 0;
    r.finite = true;
    settles = true;
    for (int at = 0; at < 20; at++) {
        const pid_t child = fork();
        int status;
        if (!child) _exit(run_mortal(&r, at) ? 1 : skipped ? 0 : 2);
        waitpid(child, &status, 0);
        deaths += WIFSIGNALED(status) != 0;
        CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        CHECK(same_parameters(&w, &start));
    }
    CHECK(deaths > 2);
    fixture_close(&w), fixture_close(&start);
}

TEST_LIMIT(kill_at_every_point_loses_no_bit_of_halves, 60) {
    kill_at_every_point(HALF, false);
    half = GRADD_DT_F16;
    kill_at_every_point(HALF, false);
}

TEST_LIMIT(kill_at_every_point_loses_no_bit_of_rows, 60) {
    for (int settled = 0; settled <= !tested_backend()->host; settled++)
        kill_at_every_point(F32 | ROWS, settled);
    kill_at_every_point(MASTERS | ROWS, false);
}

TEST_LIMIT(kill_at_every_point_loses_no_bit_of_masters, 60) {
    kill_at_every_point(MASTERS, false);
}

TEST_LIMIT(kill_at_every_point_loses_no_bit_of_long_chunks, 60) {
    chunk = 2 * STEP_CHUNK;
    for (int settled = 0; settled <= !tested_backend()->host; settled++)
        kill_at_every_point(F32, settled);
    kill_at_every_point(MASTERS | ROWS, false);
}

static void kill_at_random_times(storage_t storage) {
    fixture_t whole, w;
    fixture_open_as(&whole, GRADD_ADAMW_TRANSFORMERS, storage);
    fixture_open_as(&w, GRADD_ADAMW_TRANSFORMERS, storage);
    const int steps = 40;
    run_with_deaths(&whole, steps, -1);
    unsigned random = 12345;
    int deaths = 0;
    /* A life that ends before its first chunk is followed by a longer one: a busy machine may take
     * longer for a chunk than any life that was drawn. */
    uint64_t before = UINT64_MAX;
    unsigned longest_us = 4000;
    for (;;) {
        uint64_t progress = ((step_journal_t *)w.journal)->progress;
        uint64_t now = progress >> 24;
        if (now >= (uint64_t)steps) break;
        longest_us = progress == before ? 2 * longest_us : 4000;
        before = progress;
        pid_t child = fork();
        if (!child) {
            for (uint64_t k = now; k < (uint64_t)steps; k++) {
                step_request_t r = request(&w, k, 1);
                double norm;
                if (run(&r, &norm)) _exit(1);
            }
            _exit(0);
        }
        usleep((unsigned)rand_r(&random) % longest_us + 500);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
        deaths += WIFSIGNALED(status) != 0;
    }
    CHECK(deaths > 0);
    CHECK(same_parameters(&whole, &w));
}

TEST_LIMIT(kill_at_random_times_loses_no_bit, 60) {
    kill_at_random_times(F32);
}

TEST_LIMIT(kill_at_random_times_loses_no_bit_of_masters, 60) {
    kill_at_random_times(MASTERS);
}

TEST_LIMIT(kill_at_random_times_loses_no_bit_of_rows, 60) {
    kill_at_random_times(HALF | ROWS);
}
