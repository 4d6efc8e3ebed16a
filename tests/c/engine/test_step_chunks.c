/* The length of a journal's chunks: the same bits with each, what the daemon takes for one, and the
 * launches of a step.
 */
#include "tests/c/step_fixture.h"

/* ---- bits ------------------------------------------------------------------------------------ */

static void check_length(storage_t storage, int64_t length) {
    fixture_t w, other;
    chunk = STEP_CHUNK;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, storage);
    chunk = length;
    fixture_open_as(&other, GRADD_ADAMW_TORCH, storage);
    for (uint64_t step = 0; step < 3; step++) {
        double norm, again;
        step_request_t r = request(&w, step, 1), s = request(&other, step, 1);
        CHECK_OK(run(&r, &norm));
        CHECK_OK(run(&s, &again));
        CHECK(norm == again);
    }
    CHECK(same_parameters(&w, &other));
    const step_journal_t *journal = other.journal;
    CHECK(journal->magic == (STEP_JOURNAL_LONG << 32 | (uint64_t)length));
    CHECK(journal->progress == UINT64_C(3) << 24);
    fixture_close(&w), fixture_close(&other);
}

TEST_LIMIT(all_lengths_leave_the_same_bits, 60) {
    for (storage_t storage = F32; storage <= (MASTERS | ROWS); storage++)
        for (int64_t k = 2; k <= 3 && (storage & ~(unsigned)ROWS) <= MASTERS; k++)
            check_length(storage, k * STEP_CHUNK);
}

/* ---- a length that is none ------------------------------------------------------------------- */

static void check_refused(fixture_t *w, gradd_status_t expected, uint64_t length,
                          const char *what) {
    double norm;
    step_request_t r = request(w, 0, 1);
    step_journal_t *journal = w->journal;
    journal->magic = STEP_JOURNAL_LONG << 32 | length;
    CHECK_STATUS(expected, run(&r, &norm));
    CHECK_ERROR_HAS(what);
}

TEST(a_wrong_length_is_refused) {
    static const struct {
        uint64_t length;
        const char *got;
    } wrong[] = {
        {0,                             "got 0"         },
        {STEP_CHUNK - 1,                "got 131071"    },
        {STEP_CHUNK + 16,               "got 131088"    },
        {STEP_CHUNK_MAX + STEP_CHUNK,   "got 16908288"  },
        {UINT32_MAX - (STEP_CHUNK - 1), "got 4294836224"},
    };
    fixture_t w, start;
    fixture_open(&w, GRADD_ADAMW_TORCH), fixture_open(&start, GRADD_ADAMW_TORCH);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check_refused(&w, GRADD_E_SHM, wrong[i].length, wrong[i].got);
        CHECK_ERROR_HAS("journal: expected chunks of a multiple of 131072 elements, at most "
                        "16777216, got");
    }
    check_refused(&w, GRADD_E_TENSOR, 2 * STEP_CHUNK,
                  "journal: expected 3149824 bytes for chunks of 262144 elements, got "
                  "1576960");
    check_refused(&w, GRADD_E_TENSOR, STEP_CHUNK_MAX, "expected 201330688 bytes");
    CHECK(same_parameters(&w, &start));
    memset(w.journal, 0, sizeof(step_journal_t));
    double norm, again;
    step_request_t r = request(&w, 0, 1), s = request(&start, 0, 1);
    CHECK_OK(run(&r, &norm));
    CHECK_OK(run(&s, &again));
    CHECK(same_parameters(&w, &start));
    fixture_close(&w), fixture_close(&start);
}

/* ---- a client that writes while the step runs -------------------------------------------------
 */

static step_journal_t *meddled;
static const gradd_backend_t *honest;

static gradd_status_t meddling_adam(gradd_queue_t *queue, const gradd_adam_t *hyper, float scale,
                                    const gradd_adam_span_t *span) {
    meddled->magic = STEP_JOURNAL_LONG << 32 | STEP_CHUNK_MAX;
    meddled->progress = UINT64_C(7) << 24 | 99;
    memset(meddled->rows, 0xff, sizeof meddled->rows);
    return honest->adam(queue, hyper, scale, span);
}

static void check_meddled(storage_t storage) {
    static gradd_backend_t backend;
    fixture_t w, whole;
    double norm;
    honest = tested_backend();
    backend = *honest;
    backend.adam = meddling_adam;
    fixture_open_as(&w, GRADD_ADAMW_TORCH, storage);
    fixture_open_as(&whole, GRADD_ADAMW_TORCH, storage);
    meddled = w.journal;
    step_request_t r = request(&w, 0, 1), s = request(&whole, 0, 1);
    gradd_device_t *device = open_on(&backend);
    CHECK_OK(run_on(device, &r, &norm));
    CHECK_OK(run(&s, &norm));
    CHECK(same_parameters(&w, &whole)); /* which lie behind the journal */
    gradd_device_close(device);
    fixture_close(&w), fixture_close(&whole);
}

TEST(the_length_is_read_once) {
    check_meddled(F32);
    check_meddled(MASTERS | ROWS);
    chunk = 2 * STEP_CHUNK;
    check_meddled(F32);
    check_meddled(MASTERS | ROWS);
}

/* ---- launches ---------------------------------------------------------------------------------
 */

/* Counts what is put into the queue in a step, and passes it on to `honest` if there is one: else
 * parameters need no memory, of any size. */
static int launches;

static gradd_status_t count_adam(gradd_queue_t *queue, const gradd_adam_t *hyper, float scale,
                                 const gradd_adam_span_t *span) {
    launches++;
    return honest ? honest->adam(queue, hyper, scale, span) : GRADD_OK;
}

static gradd_status_t count_commit(gradd_queue_t *queue, const gradd_adam_commit_t *commit) {
    launches++;
    return honest ? honest->adam_commit(queue, commit) : GRADD_OK;
}

static gradd_status_t count_store(gradd_queue_t *queue, uint64_t *word, uint64_t value) {
    launches++;
    if (honest) return honest->store(queue, word, value);
    *word = value;
    return GRADD_OK;
}

static gradd_status_t copy_at_once(gradd_queue_t *queue, void *to, const void *from, size_t bytes) {
    (void)queue;
    memcpy(to, from, bytes);
    return GRADD_OK;
}

static gradd_status_t enter_nothing(gradd_queue_t *queue, int threads) {
    (void)queue, (void)threads;
    return GRADD_OK;
}

static gradd_status_t wait_for_nothing(gradd_queue_t *queue, int *out_launch) {
    (void)queue, (void)out_launch;
    return GRADD_OK;
}

/* Launches of the second step of parameters of these sizes, by the step's own code. */
static int dry_launches(const int64_t *sizes, int n) {
    static const gradd_backend_t dry = {.queue_enter = enter_nothing,
                                        .wait = wait_for_nothing,
                                        .copy = copy_at_once,
                                        .adam = count_adam,
                                        .adam_commit = count_commit,
                                        .store = count_store};
    static float memory; /* as addresses alone */
    step_journal_t journal = {0};
    gradd_adam_t group = {1e-2, 0.9, 0.999, 1e-6, 0.1, GRADD_ADAMW_TORCH, true, 1};
    gradd_device_t device = {.backend = &dry};
    step_tensor_t *tensors = calloc((size_t)n, sizeof tensors[0]);
    double norm;
    for (int i = 0; i < n; i++)
        tensors[i] = (step_tensor_t){.p = &memory,
                                     .m = &memory,
                                     .v = &memory,
                                     .g = &memory,
                                     .n = sizes[i],
                                     .dtype = GRADD_DT_F32};
    make_journal(&journal);
    step_request_t r = {.tensors = tensors,
                        .n_tensors = n,
                        .groups = &group,
                        .n_groups = 1,
                        .journal = &journal,
                        .journal_bytes = (int64_t)STEP_JOURNAL_BYTES_OF(chunk)};
    honest = NULL;
    for (r.step = 0; r.step < 2; r.step++) {
        launches = 0;
        CHECK_OK(step_apply(&device, &r, &norm, &skipped));
    }
    free(tensors);
    return launches;
}

/* Of the two parameters of a fixture, on a device. */
static int real_launches(void) {
    static gradd_backend_t counting;
    fixture_t w;
    fixture_open(&w, GRADD_ADAMW_TORCH);
    honest = tested_backend();
    counting = *honest;
    counting.adam = count_adam;
    counting.adam_commit = count_commit;
    counting.store = count_store;
    gradd_device_t *device = open_on(&counting);
    for (uint64_t step = 0; step < 2; step++) {
        double norm;
        step_request_t r = request(&w, step, 0);
        launches = 0;
        CHECK_OK(run_on(device, &r, &norm));
    }
    gradd_device_close(device);
    fixture_close(&w);
    return launches;
}

/* Four a chunk, and the words fingerprint, norm and progress. */
TEST(launches_follow_the_length) {
    static const int64_t sizes[] = {N_SMALL, N_LARGE};
    static const int chunks[] = {1 + 3, 1 + 2, 1 + 1};
    for (int k = 0; k < 3; k++) {
        chunk = (k + 1) * STEP_CHUNK;
        CHECK_EQ_INT(real_launches(), 4 * chunks[k] + 3);
        CHECK_EQ_INT(dry_launches(sizes, 2), 4 * chunks[k] + 3);
    }
}

/* A model with the sizes of Llama-3.2-1B. */
TEST(a_billion_parameters_take_few_launches) {
    enum { LAYERS = 16, WIDTH = 2048, KEYS = 512, INNER = 8192, WORDS = 128256 };
    static const int64_t layer[] = {WIDTH * WIDTH, KEYS * WIDTH,  KEYS * WIDTH,
                                    WIDTH * WIDTH, INNER * WIDTH, INNER * WIDTH,
                                    INNER * WIDTH, WIDTH,         WIDTH};
    int64_t sizes[2 + LAYERS * 9] = {(int64_t)WORDS * WIDTH, WIDTH}, all = sizes[0] + sizes[1];
    for (int i = 0; i < LAYERS * 9; i++)
        all += sizes[2 + i] = layer[i % 9];
    const int n = sizeof sizes / sizeof sizes[0];
    CHECK(n == 146 && all == 1235814400);
    CHECK_EQ_INT(dry_launches(sizes, n), 37847);
    chunk = STEP_CHUNK_MAX;
    CHECK_EQ_INT(dry_launches(sizes, n), 4 * (16 + 9 * LAYERS + 1) + 3);
}
