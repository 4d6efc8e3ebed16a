/* Losses of power: a training on a disk that forgets, reorders and tears what it was not told to
 * keep (tests/c/simulated_disk.h), interrupted in every operation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/c/lasting_training.h"
#include "tests/c/simulated_disk.h"
#include "tests/test.h"
#include "train/lasting.h"

enum { STEPS = 5, MORE = 1, MOST = 64 };

static const gradd_train_lasting_t every_step = {.commit_every = 1};

/* Operations after which a step was committed. */
typedef struct recorded_s {
    disk_record_t *record;
    int operations[MOST], steps[MOST];
    int n, n_operations, failures;
    bool is_to_die; /* the disk fails for good */
} recorded_t;

static void note_commit(recorded_t *r, const gradd_train_state_t *state) {
    CHECK(r->n < MOST);
    r->operations[r->n] = disk_operations();
    r->steps[r->n++] = (int)gradd_train_commits(state).step;
}

/* A step whose commit may fail, once: the next one tries again. */
static gradd_status_t step_again(recorded_t *r, gradd_train_session_t *session) {
    const gradd_status_t status = lasting_training_step(session);
    if (!status) return GRADD_OK;
    CHECK_EQ_INT(status, GRADD_E_IO);
    CHECK_ERROR_HAS("state: the disk does not keep");
    r->failures++;
    const gradd_train_property_t note = {"note", GRADD_TRAIN_TEXT, 0, 0, "tried again"};
    CHECK_OK(gradd_train_state_set_property(gradd_train_session_state(session), &note));
    return lasting_training_step(session);
}

/* From where the state is to the end. */
static gradd_status_t train_on(recorded_t *r, gradd_train_state_t *state) {
    gradd_train_session_t *session = lasting_training_open(state);
    gradd_status_t status = GRADD_OK;
    while (!status && gradd_train_state_progress(state).step < STEPS) {
        status = r->is_to_die ? lasting_training_step(session) : step_again(r, session);
        if (!status) note_commit(r, state);
    }
    if (!status) status = gradd_train_commit(state);
    if (!status) note_commit(r, state);
    gradd_train_close(session);
    return status;
}

static void finish(recorded_t *r) {
    r->n_operations = disk_operations();
    r->record = disk_take_record();
}

/* A training, from the making of its file on. */
static recorded_t train(void) {
    recorded_t r = {0};
    disk_format();
    gradd_train_state_t *state = lasting_training_state();
    CHECK_OK(lasting_make(&simulated_disk, "state", &every_step, state));
    note_commit(&r, state);
    CHECK_OK(train_on(&r, state));
    gradd_train_state_destroy(state);
    finish(&r);
    return r;
}

/* The step that must be there after operation n; -1: not even a file. */
static int committed_before(const recorded_t *r, int n) {
    int step = -1;
    for (int i = 0; i < r->n && r->operations[i] <= n; i++)
        step = r->steps[i];
    return step;
}

static char *undisturbed;
static size_t undisturbed_n;

static void train_undisturbed(void) {
    gradd_train_state_t *state = lasting_training_state();
    CHECK_OK(lasting_training_run(state, STEPS + MORE));
    undisturbed = lasting_training_image(state, &undisturbed_n);
    gradd_train_state_destroy(state);
}

static bool is_undisturbed(const gradd_train_state_t *state) {
    size_t n;
    char *image = lasting_training_image(state, &n);
    const bool same = n == undisturbed_n && !memcmp(image, undisturbed, n);
    free(image);
    return same;
}

/* The state on the disk, or a new one in a file of its own where there may be none. */
static gradd_train_state_t *open_again(bool may_be_new) {
    gradd_train_state_t *state = NULL;
    if (lasting_open(&simulated_disk, "state", &every_step, &state)) return NULL;
    if (state || !may_be_new) return state;
    state = lasting_training_state();
    CHECK_OK(lasting_make(&simulated_disk, "state", &every_step, state));
    return state;
}

/* Whether a training that lost power in operation n goes on to the undisturbed bits, and repeats
 * no step that was committed. */
static bool survives(const recorded_t *r, int n, unsigned draw) {
    const int committed = committed_before(r, n);
    disk_lose_power(r->record, n, draw);
    gradd_train_state_t *state = open_again(committed < 0);
    if (!state) return false;
    bool fine = gradd_train_state_progress(state).step >= committed;
    if (fine) CHECK_OK(lasting_training_run(state, STEPS + MORE));
    fine = fine && is_undisturbed(state);
    gradd_train_state_destroy(state);
    return fine;
}

static unsigned draws(unsigned by_default) {
    const char *text = getenv("GRADD_DRAWS");
    return text ? (unsigned)atoi(text) : by_default;
}

static int count_lost(const recorded_t *r, unsigned n_draws) {
    int lost = 0;
    for (int n = 0; n <= r->n_operations; n++)
        for (unsigned draw = 0; draw < n_draws; draw++)
            lost += !survives(r, n, draw);
    return lost;
}

static void check_all(const recorded_t *r, int from, int to, unsigned n_draws) {
    for (int n = from; n <= to && n <= r->n_operations; n++)
        for (unsigned draw = 0; draw < n_draws; draw++)
            if (!survives(r, n, draw))
                test_fail(__FILE__, __LINE__, "operation %d of %d, draw %u: %s", n, r->n_operations,
                          draw, gradd_error_message());
}

TEST_LIMIT(a_training_survives_a_loss_in_every_operation, 300) {
    train_undisturbed();
    const recorded_t r = train();
    CHECK(r.n_operations > 100);
    printf("%d operations\n", r.n_operations);
    check_all(&r, 0, r.n_operations, draws(5));
    disk_record_free(r.record);
}

/* The disk bites: without either of the two barriers of a commit trainings are lost. */
static bool is_even(int number) {
    return number % 2 == 0;
}

static bool is_odd(int number) {
    return number % 2 == 1;
}

TEST_LIMIT(without_a_barrier_it_does_not, 60) {
    train_undisturbed();
    disk_forget(is_even);
    recorded_t r = train();
    CHECK(count_lost(&r, 3) > 0);
    disk_record_free(r.record);
    disk_forget(is_odd);
    r = train();
    CHECK(count_lost(&r, 3) > 0);
    disk_record_free(r.record);
}

/* A commit that fails may be on the disk or not: what it has written is left alone. Of the third
 * commit the first barrier fails, or the second. */
TEST_LIMIT(a_barrier_that_fails_is_survived, 120) {
    train_undisturbed();
    for (int number = 4; number < 8; number++) {
        disk_fail(number);
        const recorded_t r = train();
        CHECK_EQ_INT(r.failures, 1);
        disk_fail(-1);
        check_all(&r, 0, r.n_operations, draws(2));
        disk_record_free(r.record);
    }
}

/* Killed in operation `at`, with all that it has written in the system's memory; the next process
 * goes on from there. */
static recorded_t train_killed(int at) {
    recorded_t r = {.is_to_die = true};
    disk_format();
    disk_kill(at);
    gradd_train_state_t *state = lasting_training_state();
    gradd_status_t status = lasting_make(&simulated_disk, "state", &every_step, state);
    if (!status) note_commit(&r, state);
    if (!status) status = train_on(&r, state);
    CHECK_EQ_INT(status, GRADD_E_IO);
    gradd_train_state_destroy(state);
    disk_kill(-1);
    state = open_again(true);
    CHECK(state);
    note_commit(&r, state);
    CHECK_OK(train_on(&r, state));
    gradd_train_state_destroy(state);
    finish(&r);
    return r;
}

/* What a process that was killed has left unkept is kept before anything is built on it. */
TEST_LIMIT(a_kill_and_then_a_loss_are_survived, 900) {
    const int step = getenv("GRADD_DRAWS") ? 1 : 3;
    train_undisturbed();
    const recorded_t whole = train();
    for (int at = 1; at < whole.n_operations; at += step) {
        const recorded_t r = train_killed(at);
        check_all(&r, at, at + 30, draws(1));
        disk_record_free(r.record);
    }
    disk_record_free(whole.record);
}
