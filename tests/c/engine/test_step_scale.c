/* Loss scaling in the optimizer's step: gradients that count by a factor, and steps that are
 * skipped because a gradient is not finite.
 */
#include "tests/c/step_fixture.h"

/* Gradients of 2^10 times what they stand for give the bits of those themselves: nothing rounds. */
TEST(scaled_gradients_count_by_their_factor) {
    for (double max_norm = 0; max_norm < 2; max_norm += 1.5) {
        fixture_t w, scaled;
        fixture_open(&w, GRADD_ADAMW_TORCH), fixture_open(&scaled, GRADD_ADAMW_TORCH);
        for (int t = 0; t < 2; t++)
            for (int64_t i = 0; i < w.tensors[t].n; i++)
                write_at(GRADD_DT_F32, (void *)scaled.tensors[t].g, i,
                         0x1p10f * gradient(&w, t, i));
        for (uint64_t step = 0; step < 3; step++) {
            double norm, other;
            step_request_t r = request(&w, step, max_norm), s = request(&scaled, step, max_norm);
            s.grad_scale = 0x1p-10;
            s.finite = true;
            CHECK_OK(run(&r, &norm));
            CHECK(!skipped);
            CHECK_OK(run(&s, &other));
            CHECK(!skipped);
            if (max_norm > 0) CHECK(other == norm);
        }
        CHECK(same_parameters(&w, &scaled));
        fixture_close(&w), fixture_close(&scaled);
    }
}

static void check_skipped(storage_t storage, float bad) {
    fixture_t w, start;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, storage),
        fixture_open_as(&start, GRADD_ADAMW_TORCH, storage);
    double norm;
    step_request_t r = request(&w, 0, 1);
    r.finite = true;
    const float good = gradient(&w, 1, N_LARGE - 1);
    write_at(w.tensors[1].dtype, (void *)w.tensors[1].g, N_LARGE - 1, bad);
    for (int again = 0; again < 2; again++) { /* and the answer is repeated */
        skipped = false;
        CHECK_OK(run(&r, &norm));
        CHECK(skipped && !isfinite(norm));
        CHECK(same_parameters(&w, &start));
    }
    write_at(w.tensors[1].dtype, (void *)w.tensors[1].g, N_LARGE - 1, good);
    step_request_t next = request(&w, 1, 1), first = request(&start, 0, 1);
    next.finite = true;
    w.group.step = 1; /* the skipped one does not count */
    CHECK_OK(run(&next, &norm));
    CHECK(!skipped);
    CHECK_OK(run(&first, &norm));
    CHECK(same_parameters(&w, &start));
    fixture_close(&w), fixture_close(&start);
}

TEST(a_step_with_a_gradient_that_is_not_finite_is_skipped) {
    check_skipped(F32, NAN);
    check_skipped(F32, -INFINITY);
    for (int i = 0; i < 2; i++) {
        half = halves[i];
        check_skipped(HALF, INFINITY);
        check_skipped(MASTERS, NAN);
    }
}

/* The largest gradients are finite, and so are their squares. */
TEST(the_largest_gradients_are_finite) {
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    for (int64_t i = 0; i < w.tensors[1].n; i++)
        write_at(GRADD_DT_F32, (void *)w.tensors[1].g, i, 3.4e38f);
    step_request_t r = request(&w, 0, 0);
    double norm;
    r.finite = true;
    CHECK_OK(run(&r, &norm));
    CHECK(!skipped && isfinite(norm));
    fixture_close(&w);
}
