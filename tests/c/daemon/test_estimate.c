/* Tests of server/explain: the parts of an estimate, and the lists that all output is made of. */
#include "tests/test.h"

#include <stdlib.h>
#include <string.h>

#include "server/explain/estimate.h"
#include "server/explain/explain_report.h"

static const optimizer_t *optimizer(const char *name) {
    const optimizer_t *found = NULL;
    CHECK_OK(estimate_optimizer(name, name ? strlen(name) : 0, "optimizer", &found));
    return found;
}

TEST(optimizers_have_two_spellings) {
    const optimizer_t *found = optimizer(NULL);
    CHECK_EQ_STR(found->name, "adamw");
    CHECK(optimizer("fused_adam") == optimizer("fused-adam"));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, estimate_optimizer("adamw", 5 - 1, "it", &found));
    CHECK_ERROR_HAS("it 'adam': expected one of adamw fused-adam momentum sgd none");
    CHECK_STATUS(GRADD_E_UNSUPPORTED, estimate_optimizer("fused adam", 10, "it", &found));
}

TEST(parts_add_up) {
    const gradd_type_t f32 = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {10}};
    const gradd_type_t outputs[] = {f32, f32};
    const gradd_plan_info_t info = {
        .n_outputs = 2, .outputs = outputs, .arena_bytes = 1000, .constant_bytes = 500};
    estimate_t e = {0};
    estimate_add_input(&e, ESTIMATE_TRAINED, &f32, optimizer("adamw"));
    estimate_add_input(&e, ESTIMATE_FROZEN, &f32, optimizer("adamw"));
    estimate_add_input(&e, ESTIMATE_DATA, &f32, optimizer("adamw"));
    estimate_add_plan(&e, &info, (const int32_t[]){1}, 1);
    estimate_finish(&e, true);
    CHECK_EQ_INT(e.parameters, 40);
    CHECK_EQ_INT(e.frozen, 40);
    CHECK_EQ_INT(e.second_slot, 40);
    CHECK_EQ_INT(e.state, 80);
    CHECK_EQ_INT(e.ring, 160);
    CHECK_EQ_INT(e.total, 40 + 40 + 40 + 40 + 80 + 1000 + 500 + 160);
    estimate_finish(&e, false);
    CHECK_EQ_INT(e.total, 40 + 40 + 40 + 80 + 1000 + 500 + 160);
}

TEST(plans_of_one_step_add_up) {
    const gradd_plan_info_t info = {.arena_bytes = 1000, .constant_bytes = 500};
    estimate_t e = {0};
    estimate_add_plan(&e, &info, NULL, 0);
    estimate_add_plan(&e, &info, NULL, 0);
    estimate_set_trained(&e, 40, 10, optimizer("fused-adam"));
    estimate_finish(&e, false);
    CHECK_EQ_INT(e.activations, 2000);
    CHECK_EQ_INT(e.state, 80);
    CHECK_EQ_INT(e.total, 2000 + 1000 + 40 + 40 + 80);
}

TEST(the_cheapest_saving_of_several_plans_comes_first) {
    gradd_curve_t a = {
        .points = {{100, 0, 0}, {50, 50, 5}, {10, 90, 100}},
          .n = 3, .model_us = 10
    };
    const gradd_curve_t b = {
        .points = {{30, 0, 0}, {20, 10, 8}},
          .n = 2, .model_us = 20
    };
    estimate_merge_curves(&a, &b);
    const gradd_curve_point_t expected[] = {
        {130, 0,   0  },
        {80,  50,  5  },
        {70,  60,  13 },
        {30,  100, 108}
    };
    CHECK_EQ_INT(a.n, 4);
    CHECK(a.model_us == 30);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ_INT(a.points[i].arena_bytes, expected[i].arena_bytes);
        CHECK_EQ_INT(a.points[i].recomputed_bytes, expected[i].recomputed_bytes);
        CHECK(a.points[i].extra_us == expected[i].extra_us);
    }
    gradd_curve_t fine = {.n = GRADD_CURVE_POINTS}, other = fine;
    for (int i = 0; i < fine.n; i++)
        fine.points[i] = other.points[i] = (gradd_curve_point_t){100 - i, i, i};
    estimate_merge_curves(&fine, &other);
    CHECK_EQ_INT(fine.n, GRADD_CURVE_POINTS);
    CHECK_EQ_INT(fine.points[0].arena_bytes, 200);
    CHECK_EQ_INT(fine.points[GRADD_CURVE_POINTS - 1].arena_bytes, 186);
}

/* A plan takes types without memory behind them, so sizes may be any. */
TEST(sums_stay_at_the_largest_number) {
    const gradd_type_t huge = {
        .dtype = GRADD_DT_F32, .rank = 2, .dims = {INT64_C(1) << 30, INT64_C(1) << 30}
    };
    estimate_t e = {0};
    for (int i = 0; i < 3; i++)
        estimate_add_input(&e, ESTIMATE_TRAINED, &huge, optimizer("fused-adam"));
    estimate_finish(&e, true);
    CHECK(e.parameters == INT64_MAX && e.state == INT64_MAX && e.total == INT64_MAX);
}

TEST(columns_fit_what_they_describe) {
    for (const explain_column_t *c = explain_columns; c->key; c++) {
        CHECK(c->offset < sizeof(explain_line_t) && c->meaning[0]);
        CHECK(!c->heading[0] || c->width != 0);
        CHECK(!c->heading[0] || strlen(c->heading) <= (size_t)abs(c->width) ||
              c->form == EXPLAIN_PLACE);
        for (const explain_column_t *d = explain_columns; d != c; d++)
            CHECK(strcmp(c->key, d->key) != 0);
    }
    for (const explain_column_t *c = explain_totals; c->key; c++)
        CHECK(c->offset < sizeof(explain_report_t) && c->meaning[0]);
}
