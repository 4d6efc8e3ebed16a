/* Models that no session uses: small ones wait for the next client, large ones go at once. */
#include "server/verbs/worker.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/c/onnx_build.h"
#include "tests/test.h"

/* A model that passes a constant of `bytes` bytes on. */
static uint8_t *make_model(size_t bytes, size_t *out_n) {
    Onnx__ModelProto *proto = build_model();
    Onnx__TensorProto *init = build_init(proto, "c", GRADD_DT_U8, 1, BUILD_DIMS((int64_t)bytes));
    build_raw(init, build_alloc(bytes), bytes);
    build_node(proto, "Identity", "pass", "c", "y");
    build_output(proto, "y");
    return build_pack(proto, out_n);
}

/* Such a model, loaded under an id of its own. */
static model_entry_t *load(worker_t *worker, uint8_t id, size_t bytes) {
    uint8_t key[GRADD_SHA256_BYTES] = {id};
    model_entry_t *entry = NULL;
    size_t n;
    uint8_t *onnx = make_model(bytes, &n);
    CHECK_OK(cache_load_model(worker, key, onnx, n, &entry));
    return entry;
}

static worker_t open_worker(const char *root) {
    const gradd_device_options_t o = {.threads = 1};
    worker_t worker = {.root = root};
    CHECK_OK(worker_open_device(&worker, &o));
    return worker;
}

static void close_worker(worker_t *worker) {
    cache_finish(worker);
    gradd_device_close(worker->device);
}

static int count(const worker_t *worker) {
    int n = 0;
    for (const model_entry_t *m = worker->models; m; m = m->next)
        n++;
    return n;
}

static compiled_t *compile(worker_t *worker, model_entry_t *model) {
    int32_t output = 0;
    const gradd_plan_options_t o = {.outputs = &output, .n_outputs = 1, .device = worker->device};
    compiled_t *compiled = NULL;
    bool hit;
    CHECK_OK(cache_compile(worker, model, &o, &compiled, &hit));
    return compiled;
}

TEST(small_models_wait_for_the_next_client) {
    worker_t worker = open_worker("");
    model_entry_t *small = load(&worker, 1, 1000);
    cache_release_compiled(&worker, compile(&worker, small));
    cache_release_model(&worker, small);
    CHECK_EQ_INT(count(&worker), 1);
    CHECK(worker.compiled != NULL);
    close_worker(&worker);
    CHECK(!worker.models && !worker.compiled);
}

TEST(large_models_go_with_their_last_client) {
    worker_t worker = open_worker("");
    model_entry_t *small = load(&worker, 1, 1000), *large = load(&worker, 2, (size_t)40 << 20);
    compiled_t *plan = compile(&worker, large);
    cache_release_model(&worker, large);
    CHECK_EQ_INT(count(&worker), 2); /* the plan holds it */
    cache_release_compiled(&worker, plan);
    CHECK(!worker.compiled);
    CHECK_EQ_INT(count(&worker), 1);
    CHECK(worker.models == small);
    cache_release_model(&worker, small);
    close_worker(&worker);
}

/* A plan of one device is none of another, though all else is the same. */
TEST(the_device_is_part_of_a_plans_key) {
    worker_t worker = open_worker("");
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *first = worker.device, *second;
    CHECK_OK(gradd_device_open(&o, &second));
    model_entry_t *model = load(&worker, 1, 1000);
    compiled_t *a = compile(&worker, model);
    CHECK(compile(&worker, model) == a);
    worker.device = second;
    compiled_t *b = compile(&worker, model);
    CHECK(b != a);
    worker.device = first;
    cache_release_compiled(&worker, a), cache_release_compiled(&worker, a);
    cache_release_compiled(&worker, b);
    cache_release_model(&worker, model);
    close_worker(&worker);
    gradd_device_close(second);
}

/* Nor is a plan that knows other parameters. */
TEST(parameters_are_part_of_a_plans_key) {
    static const gradd_type_t types[] = {
        {GRADD_DT_F32, 1, {4}},
        {GRADD_DT_F32, 1, {4}},
    };
    static const int32_t both[] = {0, 1};
    const uint8_t id[GRADD_SHA256_BYTES] = {3};
    worker_t worker = open_worker("");
    Onnx__ModelProto *proto = build_model();
    build_input(proto, "x", GRADD_DT_F32, 1, types[0].dims);
    build_input(proto, "w", GRADD_DT_F32, 1, types[1].dims);
    build_node(proto, "Add", "sum", "x,w", "y");
    build_output(proto, "y");
    size_t n;
    uint8_t *onnx = build_pack(proto, &n);
    model_entry_t *model;
    CHECK_OK(cache_load_model(&worker, id, onnx, n, &model));
    gradd_plan_options_t o = {
        .inputs = types, .n_inputs = 2, .outputs = both, .n_outputs = 1, .device = worker.device};
    compiled_t *plans[4];
    bool hit;
    for (int i = 0; i < 4; i++) {
        o.parameters = &both[i >= 2], o.n_parameters = i ? 1 : 0; /* none, x, w, w again */
        CHECK_OK(cache_compile(&worker, model, &o, &plans[i], &hit));
        CHECK_EQ_INT(hit, i == 3);
    }
    CHECK(plans[3] == plans[2] && plans[2] != plans[1] && plans[1] != plans[0]);
    CHECK(gradd_plan_is_parameter(plans[2]->plan, 1) &&
          !gradd_plan_is_parameter(plans[1]->plan, 1));
    for (int i = 0; i < 4; i++)
        cache_release_compiled(&worker, plans[i]);
    cache_release_model(&worker, model);
    close_worker(&worker);
}

TEST(a_device_is_found_by_its_name) {
    worker_t worker = open_worker("");
    gradd_device_t *found = NULL;
    CHECK_OK(worker_find_device(&worker, "cpu", 3, &found));
    CHECK(found == worker.device);
    found = NULL;
    CHECK_OK(worker_find_device(&worker, NULL, 0, &found));
    CHECK(found == worker.device);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, worker_find_device(&worker, "cpus", 4, &found));
    CHECK_ERROR_HAS("there is no device 'cpus', only 'cpu'");
    close_worker(&worker);
}

/* The machine's free memory bounds models and the contents of plans, too. */
TEST(a_full_machine_takes_no_model) {
    char root[] = "/tmp/gradd-cache-XXXXXX", proc[64], file[96];
    CHECK(mkdtemp(root) != NULL);
    snprintf(proc, sizeof proc, "%s/proc", root);
    snprintf(file, sizeof file, "%s/meminfo", proc);
    CHECK_EQ_INT(mkdir(proc, 0700), 0);
    FILE *meminfo = fopen(file, "w");
    CHECK(meminfo != NULL);
    fprintf(meminfo, "MemTotal: 99999 kB\nMemAvailable: %d kB\nSwapFree: 0 kB\n", 60 << 10);
    fclose(meminfo);

    worker_t worker = open_worker(root);
    uint8_t key[GRADD_SHA256_BYTES] = {1};
    model_entry_t *entry = NULL;
    size_t n;
    uint8_t *onnx = make_model((size_t)40 << 20, &n);
    CHECK_STATUS(GRADD_E_NOMEM, cache_load_model(&worker, key, onnx, n, &entry));
    CHECK_ERROR_HAS("the model needs 80 MiB of memory; the machine");
    CHECK(!worker.models);
    CHECK_STATUS(GRADD_E_NOMEM, worker_admit_plan(&worker, (int64_t)64 << 20));
    CHECK_ERROR_HAS("the plan needs 64 MiB of memory; the machine");
    CHECK_OK(worker_admit_plan(&worker, (int64_t)50 << 20));
    close_worker(&worker);
    unlink(file), rmdir(proc), rmdir(root);
}

/* Nor is a plan of another memory budget, or of another policy where there is none. */
TEST(a_memory_budget_is_part_of_a_plans_key) {
    static const struct {
        int64_t budget;
        gradd_recompute_t recompute;
        bool hit;
    } asked[] = {
        {0,    GRADD_RECOMPUTE_NONE,       false},
        {4096, GRADD_RECOMPUTE_NONE,       false},
        {8192, GRADD_RECOMPUTE_NONE,       false},
        {8192, GRADD_RECOMPUTE_LAYERS,     true }, /* the budget decides */
        {0,    GRADD_RECOMPUTE_LAYERS,     false},
        {0,    GRADD_RECOMPUTE_COMPROMISE, false},
        {0,    GRADD_RECOMPUTE_NONE,       true },
    };
    enum { N = sizeof asked / sizeof asked[0] };
    worker_t worker = open_worker("");
    model_entry_t *model = load(&worker, 1, 1000);
    int32_t output = 0;
    compiled_t *plans[N];
    bool hit;
    for (int i = 0; i < N; i++) {
        const gradd_plan_options_t o = {.outputs = &output,
                                        .n_outputs = 1,
                                        .device = worker.device,
                                        .memory_budget = asked[i].budget,
                                        .recompute = asked[i].recompute};
        CHECK_OK(cache_compile(&worker, model, &o, &plans[i], &hit));
        CHECK_EQ_INT(hit, asked[i].hit);
    }
    for (int i = 0; i < N; i++)
        cache_release_compiled(&worker, plans[i]);
    cache_release_model(&worker, model);
    close_worker(&worker);
}
