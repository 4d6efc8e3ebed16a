/* States in files: what comes back, when they are committed, kills at any moment, and files that
 * are no states. Losses of power are in test_power.c. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/c/lasting_training.h"
#include "tests/c/onnx_build.h"
#include "tests/test.h"
#include "train/lasting.h"

static const gradd_train_lasting_t every_step = {.commit_every = 1};
static const gradd_train_lasting_t never = {.commit_every = INT64_MAX};

static const char *path_of(const char *name) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/gradd-%ld-%s", (long)getpid(), name);
    return path;
}

static gradd_train_state_t *open_state(const char *path, const gradd_train_lasting_t *options) {
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_open_state(path, options, &state));
    return state;
}

static gradd_train_state_t *kept_state(const char *path, const gradd_train_lasting_t *options) {
    gradd_train_state_t *state = lasting_training_state();
    CHECK_OK(gradd_train_keep_state(state, path, options));
    return state;
}

/* ---- what comes back ------------------------------------------------------------------------- */

/* At every step in another process, as it were; through the thaw. */
TEST(a_training_goes_on_with_the_same_bits) {
    const char *path = path_of("state");
    gradd_train_state_t *state = kept_state(path, &never);
    for (int64_t steps = 1; steps <= 8; steps++) {
        CHECK_OK(lasting_training_run(state, steps));
        lasting_training_check(state, steps);
        gradd_train_state_destroy(state);
        state = open_state(path, &never);
        lasting_training_check(state, steps);
    }
    CHECK_EQ_INT(gradd_train_commits(state).number, 9);
    gradd_train_state_destroy(state);
    unlink(path);
}

/* With a checkpoint between; its learning rate is that of the schedule. */
TEST(a_checkpoint_goes_on_with_the_same_bits) {
    const char *path = path_of("checkpoint");
    gradd_train_state_t *state = lasting_training_state();
    for (int64_t steps = 1; steps <= 6; steps++) {
        CHECK_OK(lasting_training_run(state, steps));
        CHECK_OK(gradd_train_state_save(state, path, true));
        gradd_train_state_destroy(state);
        CHECK_OK(gradd_train_state_load(path, &state));
        CHECK_EQ_INT(gradd_train_state_progress(state).position, steps);
        CHECK_EQ_INT(gradd_train_state_property_count(state), 1); /* the note alone */
    }
    CHECK_OK(lasting_training_run(state, 9));
    gradd_train_state_t *expected = lasting_training_state();
    CHECK_OK(lasting_training_run(expected, 9));
    for (int i = 0; i < gradd_train_state_count(expected); i++) { /* theirs is another order */
        const gradd_train_parameter_t a = gradd_train_state_parameter(expected, i);
        const gradd_train_parameter_t b =
            gradd_train_state_parameter(state, gradd_train_state_find(state, a.name));
        CHECK(!memcmp(a.data, b.data, (size_t)gradd_type_bytes(&a.type)));
    }
    gradd_train_state_destroy(expected);
    gradd_train_state_destroy(state);
    unlink(path);
}

static int step_of(const char *path) {
    gradd_train_state_t *state = open_state(path, &never);
    const int64_t step = gradd_train_state_progress(state).step;
    gradd_train_state_destroy(state);
    return (int)step;
}

enum { LONG = 4096 };

/* loss = mean(b + x w), with a page of the file for each quarter of w, which is frozen. */
static gradd_train_state_t *keep_long(const char *path) {
    static float values[LONG];
    const gradd_type_t type = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {LONG}};
    gradd_train_state_t *state;
    CHECK_OK(gradd_train_state_create(&state));
    CHECK_OK(gradd_train_state_add(state, "b", &type, values, true));
    for (int i = 0; i < LONG; i++)
        values[i] = (float)i + 1;
    CHECK_OK(gradd_train_state_add(state, "w", &type, values, false));
    CHECK_OK(gradd_train_keep_state(state, path, &never));
    return state;
}

static gradd_train_session_t *open_long(gradd_train_state_t *state) {
    gradd_train_options_t options = {.optimizer = gradd_train_sgd(), .threads = 1};
    Onnx__ModelProto *m = build_model();
    gradd_train_session_t *session;
    build_input(m, "x", GRADD_DT_F32, 1, BUILD_DIMS(LONG));
    build_input(m, "w", GRADD_DT_F32, 1, BUILD_DIMS(LONG));
    build_input(m, "b", GRADD_DT_F32, 1, BUILD_DIMS(LONG));
    build_node(m, "Mul", "mul", "x,w", "p");
    build_node(m, "Add", "add", "p,b", "s");
    build_attr_int(build_node(m, "ReduceMean", "mean", "s", "loss"), "keepdims", 0);
    build_output(m, "loss");
    options.training.bytes = build_pack(m, &options.training.n);
    CHECK_OK(gradd_train_open(state, &options, &session));
    return session;
}

/* They stay in the file, as memory. Thawed ones go to another place, and what is written to the
 * file where they were does not show. */
TEST(frozen_values_outlive_their_place_in_the_file) {
    const char *path = path_of("state");
    gradd_train_state_destroy(keep_long(path));
    gradd_train_state_t *state = open_state(path, &never);
    gradd_train_session_t *session = open_long(state);
    const float *w = gradd_train_state_parameter(state, 1).data;
    CHECK_OK(gradd_train_thaw(session, "w", NULL));
    for (int k = 0; k < 4; k++) {
        CHECK_OK(gradd_train_commit(state));
        for (int i = 0; i < LONG; i++)
            CHECK(w[i] == (float)i + 1);
    }
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    state = open_state(path, &never);
    w = gradd_train_state_parameter(state, 1).data;
    for (int i = 0; i < LONG; i++)
        CHECK(w[i] == (float)i + 1);
    gradd_train_state_destroy(state);
    unlink(path);
}

TEST(values_that_the_caller_writes_are_committed) {
    static const float values[7] = {1, 2, 3, 4, 5, 6, 7};
    const char *path = path_of("state");
    gradd_train_state_t *state = kept_state(path, &never);
    const gradd_type_t type = {.dtype = GRADD_DT_F32, .rank = 1, .dims = {7}};
    CHECK_OK(gradd_train_state_write(state, 2, &type, values)); /* body.b, frozen */
    CHECK_OK(gradd_train_state_add(state, "new", &type, values, false));
    CHECK_OK(gradd_train_commit(state));
    gradd_train_state_destroy(state);
    state = open_state(path, &never);
    CHECK_EQ_INT(gradd_train_state_count(state), 9);
    CHECK(!memcmp(gradd_train_state_parameter(state, 2).data, values, sizeof values));
    CHECK(!memcmp(gradd_train_state_parameter(state, 8).data, values, sizeof values));
    gradd_train_state_destroy(state);
    unlink(path);
}

/* Places take turns: a long training does not make the file longer. */
TEST(a_file_does_not_grow) {
    const char *path = path_of("state");
    gradd_train_state_t *state = kept_state(path, &every_step);
    struct stat early, late;
    CHECK_OK(lasting_training_run(state, 8));
    CHECK(!stat(path, &early));
    CHECK_OK(lasting_training_run(state, 60));
    CHECK(!stat(path, &late));
    CHECK(late.st_size <= early.st_size + 16384);
    CHECK_EQ_INT(gradd_train_commits(state).number, 1 + 60);
    gradd_train_state_destroy(state);
    unlink(path);
}

/* ---- when ------------------------------------------------------------------------------------ */

TEST(commits_come_every_so_many_steps) {
    const gradd_train_lasting_t every_third = {.commit_every = 3};
    const char *path = path_of("state");
    gradd_train_state_t *state = kept_state(path, &every_third);
    gradd_train_session_t *session = lasting_training_open(state);
    static const int expected[] = {0, 0, 0, 3, 3, 3, 6, 6};
    for (int i = 0; i < 8; i++) {
        CHECK_OK(lasting_training_step(session)); /* commits what was before it */
        CHECK_EQ_INT(gradd_train_commits(state).step, expected[i]);
    }
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    CHECK_EQ_INT(step_of(path), 6);
    unlink(path);
}

/* A clock that the test turns. */
static double clock_now;
static double turned(void) {
    return clock_now;
}

static gradd_status_t slow_keep(gradd_file_t *file) {
    clock_now += 0.5;
    return gradd_platform.keep(file);
}

TEST(commits_come_by_time_and_take_little_of_it) {
    gradd_platform_t platform = gradd_platform;
    const gradd_train_lasting_t by_time = {0};
    const char *path = path_of("state");
    gradd_train_state_t *state = lasting_training_state();
    platform.seconds = turned;
    CHECK_OK(lasting_make(&platform, path, &by_time, state)); /* takes no time */
    gradd_train_session_t *session = lasting_training_open(state);
    CHECK_OK(lasting_training_step(session));
    clock_now += 0.999;
    CHECK_OK(lasting_training_step(session));
    CHECK_EQ_INT(gradd_train_commits(state).number, 1);
    clock_now += 0.002;
    platform.keep = slow_keep; /* from here on a commit takes a second */
    CHECK_OK(lasting_training_step(session));
    CHECK_EQ_INT(gradd_train_commits(state).number, 2);
    CHECK_EQ_INT(gradd_train_commits(state).step, 2);
    CHECK_NEAR(gradd_train_commits(state).seconds, 1, 1e-9);
    clock_now += 33.2; /* 3.01 % */
    CHECK_OK(lasting_training_step(session));
    CHECK_EQ_INT(gradd_train_commits(state).number, 2);
    clock_now += 0.2;
    CHECK_OK(lasting_training_step(session));
    CHECK_EQ_INT(gradd_train_commits(state).number, 3);
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    unlink(path);
}

/* In the middle of an accumulation there is nothing that a training could go on from. */
TEST(gradients_that_wait_are_not_lost) {
    const char *path = path_of("state");
    const float x[5] = {1, 2, 3, 4, 5};
    const int64_t label = 1;
    const gradd_train_tensor_t inputs[] = {
        {{.dtype = GRADD_DT_F32, .rank = 2, .dims = {1, 5}}, x     },
        {{.dtype = GRADD_DT_I64, .rank = 1, .dims = {1}},    &label}
    };
    gradd_train_state_t *state = kept_state(path, &every_step);
    gradd_train_session_t *session = lasting_training_open(state);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(gradd_train_step(session, inputs, 2, NULL, NULL)); /* this one commits */
        CHECK_STATUS(GRADD_E_STALE, gradd_train_commit(state));
        CHECK_OK(gradd_train_step(session, inputs, 2, NULL, NULL));
        CHECK_EQ_INT(gradd_train_commits(state).step, i);
        CHECK_OK(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
    }
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    CHECK_EQ_INT(step_of(path), 2);
    unlink(path);
}

/* ---- failures -------------------------------------------------------------------------------- */

TEST(a_file_is_open_once) {
    const char *path = path_of("state");
    gradd_train_state_t *state = kept_state(path, &never), *other = lasting_training_state();
    gradd_train_state_t *again;
    CHECK_STATUS(GRADD_E_STALE, gradd_train_open_state(path, NULL, &again));
    CHECK_ERROR_HAS("in use: this program or another has it open");
    CHECK_STATUS(GRADD_E_STALE, gradd_train_keep_state(other, path, NULL));
    CHECK_STATUS(GRADD_E_STALE, gradd_train_keep_state(state, path_of("other"), NULL));
    CHECK_ERROR_HAS("the state has a file already");
    gradd_train_state_destroy(state);
    path = path_of("state");
    CHECK_OK(gradd_train_keep_state(other, path, NULL)); /* in place of the first */
    gradd_train_state_destroy(other);
    unlink(path);
}

/* Commits to a file without a name would be lost, and so would what is in its place. */
TEST(a_file_that_is_gone_is_found_out) {
    const char *path = path_of("state");
    char moved[80];
    snprintf(moved, sizeof moved, "%s.moved", path);
    for (int how = 0; how < 3; how++) {
        gradd_train_state_t *state = kept_state(path, &every_step);
        gradd_train_session_t *session = lasting_training_open(state);
        CHECK_OK(lasting_training_step(session));
        CHECK_STATUS(GRADD_E_STALE, gradd_train_state_save(state, path, true));
        CHECK_ERROR_HAS("a checkpoint needs another path");
        CHECK_OK(gradd_train_commit(state));
        CHECK_OK(lasting_training_step(session));
        CHECK(how ? !rename(path, moved) : !unlink(path));
        if (how == 2) { /* something else is there */
            FILE *other = fopen(path, "w");
            CHECK(other && fputs("kept", other) > 0 && !fclose(other));
        }
        CHECK_STATUS(GRADD_E_STALE, gradd_train_commit(state));
        CHECK_ERROR_HAS("deleted, renamed or replaced");
        CHECK_STATUS(GRADD_E_STALE, lasting_training_step(session));
        CHECK_EQ_INT(access(path, F_OK), how == 2 ? 0 : -1);
        if (how) CHECK(!rename(moved, path));
        if (how) CHECK_OK(gradd_train_commit(state)); /* it is back */
        gradd_train_close(session);
        gradd_train_state_destroy(state);
        if (how) {
            state = open_state(path, &never);
            lasting_training_check(state, 2);
            gradd_train_state_destroy(state);
        }
        unlink(path);
    }
}

/* A relative path names nothing from another folder; the file is still there. */
TEST(the_folder_may_change) {
    char name[64];
    CHECK(!chdir("/tmp"));
    snprintf(name, sizeof name, "gradd-%ld-relative", (long)getpid());
    gradd_train_state_t *state = kept_state(name, &never);
    CHECK(!chdir("/"));
    CHECK_OK(lasting_training_run(state, 1));
    CHECK_OK(gradd_train_commit(state));
    CHECK(!chdir("/tmp"));
    gradd_train_state_destroy(state);
    unlink(name);
}

TEST(a_replaced_file_keeps_its_mode_and_a_link_its_place) {
    const char *path = path_of("checkpoint");
    char link[80];
    struct stat st;
    gradd_train_state_t *state = lasting_training_state();
    snprintf(link, sizeof link, "%s.link", path);
    CHECK_OK(gradd_train_state_save(state, path, true));
    CHECK(!chmod(path, 0640) && !symlink(path, link));
    CHECK_OK(gradd_train_state_save(state, link, true));
    CHECK(!stat(path, &st) && (st.st_mode & 0777) == 0640);
    CHECK(!lstat(link, &st) && S_ISLNK(st.st_mode));
    CHECK(!unlink(link) && !mkfifo(link, 0600));
    CHECK_STATUS(GRADD_E_IO, gradd_train_state_save(state, link, true));
    CHECK_ERROR_HAS("is there and not a file");
    CHECK(!lstat(link, &st) && S_ISFIFO(st.st_mode));
    gradd_train_state_destroy(state);
    unlink(link);
    unlink(path);
}

TEST(what_is_not_there_is_named) {
    gradd_train_state_t *state;
    const gradd_train_lasting_t wrong = {.commit_every = -1};
    CHECK_STATUS(GRADD_E_IO, gradd_train_open_state(path_of("none"), NULL, &state));
    CHECK_ERROR_HAS("none': there is no such file");
    CHECK_STATUS(GRADD_E_IO, gradd_train_open_state("/tmp", NULL, &state));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_train_open_state(path_of("none"), &wrong, &state));
    state = lasting_training_state();
    CHECK_STATUS(GRADD_E_UNSUPPORTED, gradd_train_commit(state));
    CHECK_STATUS(GRADD_E_IO, gradd_train_keep_state(state, "/tmp/no-such-folder/state", NULL));
    CHECK_OK(gradd_train_keep_state(state, path_of("state"), NULL));
    const gradd_train_progress_t never_read = {.step = -1};
    gradd_train_state_set_progress(state, &never_read);
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_commit(state));
    gradd_train_state_destroy(state);
    unlink(path_of("state"));
}

TEST(what_is_missing_is_named) {
    gradd_train_state_t *state = lasting_training_state(), *made;
    gradd_train_session_t *session = lasting_training_open(state);
    gradd_train_optimizer_t optimizer;
    const int n = gradd_train_input_count(session, GRADD_TRAIN_TRAINING);
    const char *outputs[] = {NULL};
    const gradd_train_model_t none = {0};
    const gradd_train_parameter_t p = gradd_train_state_parameter(state, 0);
    const gradd_train_property_t odd = {.name = "n", .kind = (gradd_train_property_kind_t)9};
    const gradd_train_phase_t third = (gradd_train_phase_t)2;
    CHECK_STATUS(GRADD_E_IO, gradd_train_state_load(NULL, &made));
    CHECK_STATUS(GRADD_E_MODEL, gradd_train_state_load_bytes(NULL, 0, &made));
    CHECK_STATUS(GRADD_E_IO, gradd_train_state_save(state, NULL, true));
    CHECK_STATUS(GRADD_E_IO, gradd_train_open_state(NULL, NULL, &made));
    CHECK_STATUS(GRADD_E_IO, gradd_train_optimizer_load(&none, &optimizer));
    CHECK_STATUS(GRADD_E_IO, gradd_train_export(session, NULL, outputs, 1));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_step(session, NULL, n, NULL, NULL));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_step(session, NULL, 0, NULL, NULL));
    CHECK_ERROR_HAS("is neither given nor a parameter of the state");
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_state_write(state, 0, &p.type, NULL));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_state_set_property(state, &odd));
    CHECK_STATUS(GRADD_E_TENSOR, gradd_train_prepare(session, third, NULL, 0));
    CHECK_EQ_INT(gradd_train_input_count(session, third), 0);
    CHECK(!gradd_train_output_name(session, third, 0));
    gradd_train_close(session);
    gradd_train_state_destroy(state);
}

/* The step before which the commit fails fails; nothing is lost, and later it works again. */
TEST(a_full_disk_is_an_error_of_a_step) {
    const char *path = path_of("state");
    struct rlimit room = {4096, RLIM_INFINITY};
    gradd_train_state_t *state = kept_state(path, &every_step);
    gradd_train_session_t *session = lasting_training_open(state);
    CHECK_OK(lasting_training_step(session));
    signal(SIGXFSZ, SIG_IGN);
    CHECK(!setrlimit(RLIMIT_FSIZE, &room));
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(GRADD_E_IO, lasting_training_step(session));
        CHECK_ERROR_HAS("cannot write");
        CHECK_ERROR_HAS(path);
    }
    room.rlim_cur = RLIM_INFINITY;
    CHECK(!setrlimit(RLIMIT_FSIZE, &room));
    CHECK_EQ_INT(gradd_train_state_progress(state).step, 1);
    CHECK_OK(lasting_training_step(session));
    CHECK_OK(gradd_train_commit(state));
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    state = open_state(path, &never);
    lasting_training_check(state, 2);
    gradd_train_state_destroy(state);
    unlink(path);
}

TEST(a_checkpoint_is_where_a_file_begins) {
    char checkpoint[64];
    const gradd_train_lasting_t options = {.checkpoint = checkpoint, .commit_every = 1};
    snprintf(checkpoint, sizeof checkpoint, "%s", path_of("checkpoint"));
    gradd_train_state_t *state = lasting_training_state();
    CHECK_OK(gradd_train_state_save(state, checkpoint, true));
    gradd_train_state_destroy(state);
    const char *path = path_of("state");
    state = open_state(path, &options);
    CHECK_OK(lasting_training_run(state, 2));
    gradd_train_state_destroy(state);
    unlink(checkpoint); /* it is not read again */
    state = open_state(path, &options);
    CHECK_EQ_INT(gradd_train_state_progress(state).step, 2);
    gradd_train_state_destroy(state);
    unlink(path);
}

/* ---- kills ----------------------------------------------------------------------------------- */

/* What a child has done, in memory that it shares. */
typedef struct told_s {
    volatile int64_t committed; /* steps */
    volatile int64_t opened;    /* step in which the latest child began; -1 = none yet */
} told_t;

static _Noreturn void train_until_killed(const char *path, const char *checkpoint, told_t *told) {
    const gradd_train_lasting_t options = {.checkpoint = checkpoint, .commit_every = 2};
    gradd_train_state_t *state = open_state(path, &options);
    told->opened = gradd_train_state_progress(state).step;
    gradd_train_session_t *session = lasting_training_open(state);
    for (;;) {
        CHECK_OK(lasting_training_step(session));
        told->committed = gradd_train_commits(state).step;
    }
}

/* A child trains for some milliseconds, then it is killed; the next one goes on. GRADD_KILLS says
 * how often. */
TEST_LIMIT(kills_at_any_moment, 600) {
    const int kills = getenv("GRADD_KILLS") ? atoi(getenv("GRADD_KILLS")) : 20;
    char path[64], checkpoint[64];
    told_t *told = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(path, sizeof path, "%s", path_of("state"));
    snprintf(checkpoint, sizeof checkpoint, "%s", path_of("checkpoint"));
    gradd_train_state_t *state = lasting_training_state();
    CHECK_OK(gradd_train_state_save(state, checkpoint, true));
    gradd_train_state_destroy(state);
    srand((unsigned)getpid());
    for (int i = 0; i < kills; i++) {
        const int64_t before = told->committed;
        told->opened = -1;
        const pid_t child = fork();
        if (!child) train_until_killed(path, checkpoint, told);
        usleep((useconds_t)(rand() % (i % 2 ? 15000 : 60000)));
        int status;
        kill(child, SIGKILL);
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* it has not failed */
        CHECK(told->opened == -1 || told->opened >= before);
    }
    state = open_state(path, &(gradd_train_lasting_t){.checkpoint = checkpoint});
    const int64_t steps = gradd_train_state_progress(state).step;
    CHECK(steps >= told->committed);
    printf("%d kills, %lld steps\n", kills, (long long)steps);
    CHECK_OK(lasting_training_run(state, steps + 3));
    lasting_training_check(state, steps + 3);
    gradd_train_state_destroy(state);
    unlink(path);
    unlink(checkpoint);
}

/* ---- files that are no states ---------------------------------------------------------------- */

/* Where fields of the table are, as lasting_table.c has them. */
enum { TABLE_N = 0, TABLE_STEP = 16, TABLE_WARMUP = 32, TABLE_RATE = 64, TABLE_FLAGS = 72 };
enum { TABLE_FIRST = 80, DIMS = 0, STEPS = 64, AT = 72, DTYPE = 96, RANK = 100, TRAINED = 104 };
enum { NAME_BYTES = 108, NAME = 112, SECOND = TABLE_FIRST + NAME + 8 };

/* A file after some steps, in memory. */
typedef struct file_image_s {
    char *bytes;
    size_t n;
    lasting_head_t *head; /* the latest */
    char *table;
} file_image_t;

static void find_head(file_image_t *f) {
    lasting_head_t *heads[] = {(void *)f->bytes, (void *)(f->bytes + LASTING_PAGE)};
    f->head = heads[heads[1]->number > heads[0]->number];
    f->table = f->bytes + f->head->table_at;
}

static file_image_t make_image(const char *path) {
    file_image_t made;
    void *bytes;
    gradd_train_state_t *state = kept_state(path, &never);
    CHECK_OK(lasting_training_run(state, 2));
    gradd_train_state_destroy(state);
    CHECK_OK(gradd_platform.read_file(path, SIZE_MAX, &bytes, &made.n));
    made.bytes = bytes;
    find_head(&made);
    CHECK_EQ_INT(made.head->number, 2);
    return made;
}

static void write_image(const file_image_t *f, const char *path) {
    const gradd_file_part_t part = {f->bytes, f->n};
    CHECK_OK(gradd_platform.write_file(path, &part, 1));
}

/* The hashes fit again. */
static void seal_image(file_image_t *f) {
    if (f->head->table_bytes < f->n && f->head->table_at + f->head->table_bytes <= f->n)
        f->head->table_hash = lasting_hash(f->table, f->head->table_bytes);
    f->head->hash = lasting_hash(f->head, offsetof(lasting_head_t, hash));
}

/* Bytes that a stranger writes to the table, and what is said of them. */
typedef struct change_s {
    int at;
    uint64_t value;
    int bytes;
    gradd_status_t code;
    const char *said;
} change_t;

static void check_change(const change_t *c, const file_image_t *whole, const char *path) {
    file_image_t f = *whole;
    gradd_train_state_t *state;
    f.bytes = malloc(f.n);
    memcpy(f.bytes, whole->bytes, f.n);
    find_head(&f);
    memcpy(f.table + c->at, &c->value, (size_t)c->bytes);
    seal_image(&f);
    write_image(&f, path);
    CHECK_STATUS(c->code, gradd_train_open_state(path, NULL, &state));
    CHECK_ERROR_HAS(c->said);
    CHECK_ERROR_HAS(path);
    free(f.bytes);
}

TEST(every_field_of_a_table_is_checked) {
    const char *path = path_of("state");
    file_image_t f = make_image(path);
    uint64_t second;
    memcpy(&second, f.table + SECOND + AT, sizeof second);
    const change_t changes[] = {
        {TABLE_N,                  9,                8, GRADD_E_MODEL,       "ends too early"             },
        {TABLE_N,                  7,                8, GRADD_E_MODEL,       "property"                   },
        {TABLE_N,                  1ull << 60,       8, GRADD_E_MODEL,       "ends too early"             },
        {TABLE_N + 8,              0,                8, GRADD_E_MODEL,       "bytes too many"             },
        {TABLE_N + 8,              1ull << 20,       8, GRADD_E_LIMIT,       "1048576 properties"         },
        {TABLE_STEP,               -1ull,            8, GRADD_E_MODEL,       "-1 steps"                   },
        {TABLE_WARMUP,             -5ull,            8, GRADD_E_MODEL,       "-5 to warm up"              },
        {TABLE_RATE,               0x7fc00000,       4, GRADD_E_MODEL,       "learning rates of nan"      },
        {TABLE_FLAGS,              4,                4, GRADD_E_MODEL,       "flags 0x4"                  },
        {TABLE_FLAGS + 4,          1,                4, GRADD_E_MODEL,       "flags"                      },
        {TABLE_FIRST + DIMS,       -2ull,            8, GRADD_E_LIMIT,       "head.w"                     },
        {TABLE_FIRST + DIMS,       1ull << 40,       8, GRADD_E_MODEL,       "'head.w': piece 0 in bytes" },
        {TABLE_FIRST + DIMS,       1ull << 62,       8, GRADD_E_LIMIT,       "head.w"                     },
        {TABLE_FIRST + STEPS,      -3ull,            8, GRADD_E_MODEL,       "'head.w': -3 steps"         },
        {TABLE_FIRST + AT,         second,           8, GRADD_E_MODEL,       "'body.w' overlap at byte"   },
        {TABLE_FIRST + AT,         64,               8, GRADD_E_MODEL,       "'head.w': piece 0 in bytes" },
        {TABLE_FIRST + AT,         8193,             8, GRADD_E_MODEL,       "no multiple of 64"          },
        {TABLE_FIRST + AT,         0,                8, GRADD_E_MODEL,       "not what comes before"      },
        {TABLE_FIRST + AT + 8,     1ull << 50,       8, GRADD_E_MODEL,       "'head.w': piece 1 in bytes" },
        {TABLE_FIRST + AT + 16,    -64ull,           8, GRADD_E_MODEL,       "'head.w': piece 2 in bytes" },
        {TABLE_FIRST + AT,         f.head->table_at, 8, GRADD_E_MODEL,       "overlap"                    },
        {TABLE_FIRST + DTYPE,      99,               4, GRADD_E_UNSUPPORTED, "head.w"                     },
        {TABLE_FIRST + DTYPE,      7,                4, GRADD_E_MODEL,       "is not a float"             },
        {TABLE_FIRST + RANK,       9,                4, GRADD_E_MODEL,       "'head.w': rank 9"           },
        {TABLE_FIRST + RANK,       -2u,              4, GRADD_E_MODEL,       "'head.w': rank -2"          },
        {TABLE_FIRST + RANK,       -1u,              4, GRADD_E_MODEL,       "'head.w'"                   },
        {TABLE_FIRST + TRAINED,    2,                4, GRADD_E_MODEL,       "'head.w': trained: 2"       },
        {TABLE_FIRST + TRAINED,    0,                4, GRADD_E_MODEL,       "moments, and is not trained"},
        {TABLE_FIRST + NAME_BYTES, -1u,              4, GRADD_E_MODEL,       "ends too early"             },
        {TABLE_FIRST + NAME_BYTES, 8,                4, GRADD_E_MODEL,       "zero byte inside"           },
        {TABLE_FIRST + NAME,       0x622e79646f62,   6, GRADD_E_MODEL,       "two parameters 'body.b'"    },
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++)
        check_change(&changes[i], &f, path);
    free(f.bytes);
    unlink(path);
}

static void check_head(file_image_t *f, const char *path, gradd_status_t code, const char *said) {
    gradd_train_state_t *state;
    write_image(f, path);
    CHECK_STATUS(code, gradd_train_open_state(path, NULL, &state));
    CHECK_ERROR_HAS(said);
    CHECK_ERROR_HAS(path);
}

TEST(heads_are_checked) {
    const char *path = path_of("state");
    file_image_t f = make_image(path);
    memset(f.bytes + LASTING_PAGE, 0, LASTING_PAGE); /* one head is enough */
    write_image(&f, path);
    CHECK_EQ_INT(step_of(path), 2);
    const lasting_head_t kept = *f.head;
    f.head->magic[0] ^= 1;
    check_head(&f, path, GRADD_E_MODEL, "not a state of gradd");
    *f.head = kept;
    f.head->version = 2;
    check_head(&f, path, GRADD_E_VERSION, "version 2, expected 1");
    *f.head = kept;
    f.head->bytes = 72;
    check_head(&f, path, GRADD_E_MODEL, "head 0 has 72 bytes");
    *f.head = kept;
    f.head->table_at ^= 64;
    check_head(&f, path, GRADD_E_MODEL, "head 0 is damaged");
    *f.head = kept;
    f.head->number = 3;
    seal_image(&f);
    check_head(&f, path, GRADD_E_MODEL, "head 0 has commit 3");
    *f.head = kept;
    f.head->table_at = f.n - 8;
    seal_image(&f);
    check_head(&f, path, GRADD_E_MODEL, "the table lies at byte");
    *f.head = kept;
    f.head->table_bytes = UINT64_MAX;
    seal_image(&f);
    check_head(&f, path, GRADD_E_LIMIT, "a table of 18446744073709551615 bytes");
    *f.head = kept;
    f.table[TABLE_STEP] ^= 1;
    check_head(&f, path, GRADD_E_MODEL, "the table is damaged");
    free(f.bytes);
    unlink(path);
}

/* Cut off anywhere: an error, or what is complete (the end of a file may be unused). */
TEST(a_file_that_is_cut_off_is_named) {
    const char *path = path_of("state");
    file_image_t f = make_image(path);
    const size_t n = f.n;
    size_t used = f.head->table_at + f.head->table_bytes;
    for (f.n = 0; f.n < n; f.n += f.n < 2 * LASTING_FIRST ? 509 : 64) {
        gradd_train_state_t *state;
        write_image(&f, path);
        const gradd_status_t status = gradd_train_open_state(path, &never, &state);
        CHECK((status == GRADD_OK) == (f.n >= used));
        if (status == GRADD_OK)
            gradd_train_state_destroy(state);
        else
            CHECK_STATUS(GRADD_E_MODEL, status);
    }
    free(f.bytes);
    unlink(path);
}
