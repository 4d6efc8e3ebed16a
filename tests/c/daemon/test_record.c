/* What is remembered of a session. */
#include "server/session/record.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static session_record_t record, copy;

static void begin(void) {
    record = (session_record_t){0};
    record_init(&record);
}

static const plan_record_t *find(uint64_t id) {
    record_copy(&record, &copy);
    for (int i = 0; i < copy.n_plans; i++)
        if (copy.plans[i].id == id) return &copy.plans[i];
    return NULL;
}

TEST(the_plans_that_were_used_last_are_remembered) {
    begin();
    for (uint64_t id = 1; id <= RECORD_PLANS; id++)
        record_plan(&record, &(plan_record_t){.id = id, .arena_bytes = (int64_t)id});
    record_ran(&record, 1, false, 10);
    record_ran(&record, 1, true, 30);
    record_ran(&record, 1000, true, 30); /* unknown */
    record_plan(&record, &(plan_record_t){.id = 50});
    CHECK(!find(2) && find(1) && find(50));
    CHECK_EQ_INT(copy.n_plans, RECORD_PLANS);
    CHECK_EQ_INT(find(1)->n_forward, 1);
    CHECK_EQ_INT(find(1)->n_backward, 1);
    CHECK_EQ_INT(find(1)->ran_us, 40);
    record_plan(&record, &(plan_record_t){.id = 1}); /* compiled once more */
    CHECK_EQ_INT(find(1)->ran_us, 0);
    record_check(&record, 3);
    CHECK(find(3)->is_check && !find(4)->is_check);
    record_drop_plan(&record, 3);
    record_drop_plan(&record, 3);
    CHECK(!find(3));
    CHECK_EQ_INT(copy.n_plans, RECORD_PLANS - 1);
    record_finish(&record);
}

TEST(the_last_errors_are_remembered_without_control_characters) {
    begin();
    for (int i = 0; i < RECORD_ERRORS + 2; i++) {
        char text[RECORD_WHAT_BYTES * 2];
        memset(text, 'x', sizeof text);
        snprintf(text, 64, "number %d\n\x1b[31m", i);
        if (i % 2) text[strlen(text)] = 'x'; /* too long */
        text[sizeof text - 1] = 0;
        gradd_error_set(text);
        record_error(&record, i, "a.verb.with.a.very.long.name", GRADD_E_SHM);
    }
    record_copy(&record, &copy);
    CHECK_EQ_INT(copy.n_errors, RECORD_ERRORS + 2);
    const error_record_t *last = &copy.errors[(copy.n_errors - 1) % RECORD_ERRORS];
    CHECK_EQ_INT(last->ms, RECORD_ERRORS + 1);
    CHECK(!memcmp(last->what, "number 9??[31mxxx", 17));
    CHECK_EQ_INT(strlen(last->what), RECORD_WHAT_BYTES - 1);
    CHECK_EQ_INT(strlen(last->verb), RECORD_VERB_BYTES - 1);
    record_finish(&record);
}

TEST(a_model_is_a_printable_name) {
    char longer[RECORD_MODEL_BYTES * 2];
    begin();
    memset(longer, 'm', sizeof longer);
    record_model(&record, "Net\n\xc3", 5, 12);
    record_copy(&record, &copy);
    CHECK(!strcmp(copy.model, "Net__"));
    CHECK_EQ_INT(copy.parameters, 12);
    record_model(&record, longer, sizeof longer, 1);
    record_copy(&record, &copy);
    CHECK_EQ_INT(strlen(copy.model), RECORD_MODEL_BYTES - 1);
    record_finish(&record);
}
