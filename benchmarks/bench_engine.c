/* Where the time of one forward and backward goes, operator by operator, without daemon or Python.
 *
 *   bench_engine model.onnx [--repeat N] [--threads N] [--top N] [--loss NAME] [--ids N]
 *                [--plain 1] input=2x3 ...
 *
 * Inputs whose shape the model leaves open are given on the command line. Floats are filled with
 * small values, integers with 0..N-1 of --ids (31) in turn, those of buffers with 0, booleans with
 * true. Trainable are all float inputs with a static shape (parameters). Prints the plan's sizes, a
 * table by operator, and the launches that take longest. A launch's time is the shortest of all
 * rounds: other processes only add to it. `launches alone` is the sum of these.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/math/bf16.h"
#include "server/exec/run.h"

#define MAX_ROWS 512

typedef struct row_s {
    char name[96];
    double seconds;
    long calls;
} row_t;

static row_t by_op[MAX_ROWS], by_launch[8192];
static int n_op, n_launch;

/* A row's time grows by `seconds`, or, with `least`, becomes the shortest so far. */
static void add(row_t *rows, int *n, int max, const char *name, double seconds, bool least) {
    int i = 0;
    while (i < *n && strcmp(rows[i].name, name))
        i++;
    if (i == max) return;
    if (i == *n) {
        snprintf(rows[i].name, sizeof rows[i].name, "%s", name);
        (*n)++;
    }
    if (!least || !rows[i].calls || seconds < rows[i].seconds)
        rows[i].seconds = (least ? 0 : rows[i].seconds) + seconds;
    rows[i].calls++;
}

static void on_launch(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                      double seconds) {
    char name[96], type[GRADD_TYPE_TEXT];
    const graph_node_t *n = launch->node < 0 ? NULL : &plan->graph->nodes[launch->node];
    (void)context;
    gradd_type_format(&launch->args.in[0].type, type);
    snprintf(name, sizeof name, "%s %.20s %.40s #%d", n && n->backward ? "bwd" : "fwd",
             n ? launch->args.op->name : "copy", type, launch->node);
    add(by_launch, &n_launch, 8192, name, seconds, true);
}

/* "fwd MatMul f32[2,3] #7" -> "fwd MatMul bf16": operators of one name and type are one row.
 * Returns seconds of all. */
static double sum_by_operator(void) {
    double sum = 0;
    for (int i = 0; i < n_launch; i++) {
        char name[96];
        memcpy(name, by_launch[i].name, sizeof name);
        *strchr(name, '[') = 0;
        add(by_op, &n_op, MAX_ROWS, name, by_launch[i].seconds, false);
        sum += by_launch[i].seconds;
    }
    return sum;
}

static int by_seconds(const void *a, const void *b) {
    double x = ((const row_t *)a)->seconds, y = ((const row_t *)b)->seconds;
    return x < y ? 1 : x > y ? -1 : 0;
}

static void print_rows(row_t *rows, int n, int top, int per) {
    qsort(rows, (size_t)n, sizeof rows[0], by_seconds);
    for (int i = 0; i < n && i < top; i++)
        printf("  %9.3f ms  %6.1f calls  %s\n", rows[i].seconds * 1e3, (double)rows[i].calls / per,
               rows[i].name);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "bench_engine: %s: %s\n", what, gradd_error_message());
    exit(1);
}

static void *read_file(const char *path, size_t *out_bytes) {
    FILE *f = fopen(path, "rb");
    if (!f) die(path);
    fseek(f, 0, SEEK_END);
    *out_bytes = (size_t)ftell(f);
    rewind(f);
    void *bytes = malloc(*out_bytes + 1);
    if (!bytes || fread(bytes, 1, *out_bytes, f) != *out_bytes) die(path);
    fclose(f);
    return bytes;
}

/* "input=2x3" of the arguments overrides the declared dims. */
static bool shape_argument(int argc, char **argv, const char *name, gradd_type_t *type) {
    size_t length = strlen(name);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], name, length) || argv[i][length] != '=') continue;
        char *at = argv[i] + length + 1;
        type->rank = 0;
        while (*at && type->rank < GRADD_MAX_RANK) {
            type->dims[type->rank++] = strtoll(at, &at, 10);
            if (*at == 'x') at++;
        }
        return true;
    }
    return false;
}

static long option(int argc, char **argv, const char *name, long otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name)) return atol(argv[i + 1]);
    return otherwise;
}

static void *fill(const gradd_type_t *type, long ids) {
    int64_t n = gradd_type_count(type);
    void *data = aligned_alloc(64, ((size_t)gradd_type_bytes(type) + 127) / 64 * 64);
    if (!data) die("memory");
    for (int64_t i = 0; i < n; i++) {
        if (type->dtype == GRADD_DT_F32)
            ((float *)data)[i] = (float)((i * 7919) % 201 - 100) / 2e3f;
        else if (type->dtype == GRADD_DT_BF16)
            ((gradd_bf16_t *)data)[i] = gradd_f32_bf16((float)((i * 7919) % 201 - 100) / 2e3f);
        else if (type->dtype == GRADD_DT_I64)
            ((int64_t *)data)[i] = type->rank ? i % ids : 100;
        else
            memset((char *)data + i * (int64_t)gradd_dtype_bytes(type->dtype), 1, 1);
    }
    return data;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr,
                "usage: bench_engine model.onnx [--repeat N] [--threads N] input=2x3 ...\n");
        return 2;
    }
    size_t bytes;
    void *file = read_file(argv[1], &bytes);
    gradd_model_t *model;
    if (gradd_model_load(file, bytes, &model)) die("load");
    int n = gradd_model_n_inputs(model), n_grads = 0;
    long ids = option(argc, argv, "--ids", 31);
    gradd_type_t *types = calloc((size_t)n + 1, sizeof types[0]);
    int32_t *grads = calloc((size_t)n + 1, sizeof grads[0]), out = 0;
    const void **inputs = calloc((size_t)n + 1, sizeof inputs[0]);
    void **slots = calloc((size_t)n + 1, sizeof slots[0]);
    bool *written = calloc((size_t)n + 1, sizeof written[0]);
    for (int i = 0; i < n; i++) {
        const char *name = gradd_model_input_name(model, i);
        types[i] = gradd_model_input_type(model, i);
        bool given = shape_argument(argc, argv, name, &types[i]);
        inputs[i] = fill(&types[i], given ? ids : 1);
        if (given || !gradd_dtype_is_float(types[i].dtype)) continue;
        slots[n_grads] = fill(&types[i], ids);
        grads[n_grads++] = i;
    }
    const gradd_device_options_t with = {.threads = (int)option(argc, argv, "--threads", 0)};
    gradd_device_t *device;
    if (gradd_device_open(&with, &device)) die("device");
    gradd_plan_options_t options = {.inputs = types,
                                    .n_inputs = n,
                                    .grads = grads,
                                    .n_grads = n_grads,
                                    .outputs = &out,
                                    .n_outputs = 1,
                                    .grad_outputs = &out,
                                    .n_grad_outputs = 1,
                                    .flags =
                                        option(argc, argv, "--plain", 0) ? GRADD_PLAN_PLAIN : 0,
                                    .device = device};
    gradd_plan_t *plan;
    if (gradd_plan_create(model, &options, &plan)) die("plan");
    const gradd_plan_info_t *info = gradd_plan_info(plan);
    printf("plan: %.1f ms, arena %.1f MB, saved %.1f MB, constants %.1f MB, %d + %d nodes\n",
           info->compile_ms, (double)info->arena_bytes / 1e6, (double)info->saved_bytes / 1e6,
           (double)info->constant_bytes / 1e6, info->n_launches_forward, info->n_launches_backward);
    bool narrow = info->outputs[0].dtype == GRADD_DT_BF16;
    gradd_bf16_t loss_bf16 = {0}, one_bf16 = gradd_f32_bf16(1);
    float loss = 0, one = 1;
    void *outputs[1] = {narrow ? (void *)&loss_bf16 : &loss};
    const void *seeds[1] = {narrow ? (const void *)&one_bf16 : &one};
    int repeat = (int)option(argc, argv, "--repeat", 5);
    double best = 1e9;
    for (int r = -1; r < repeat; r++) { /* the first round warms up */
        gradd_run_t *run;
        device_set_hook(device, r < 0 ? NULL : on_launch, NULL);
        double start = now();
        if (gradd_run_create(plan, &run)) die("run");
        if (gradd_run_forward(run, 1, 0, inputs, outputs, NULL)) die("forward");
        double middle = now();
        if (gradd_run_backward(run, seeds, slots, false, written, NULL)) die("backward");
        double end = now();
        gradd_run_destroy(run);
        printf("  forward %.2f ms, backward %.2f ms, loss %g\n", (middle - start) * 1e3,
               (end - middle) * 1e3, (double)(narrow ? gradd_bf16_f32(loss_bf16) : loss));
        if (r >= 0 && end - start < best) best = end - start;
    }
    printf("best %.2f ms, launches alone %.2f ms\nby operator\n", best * 1e3,
           sum_by_operator() * 1e3);
    print_rows(by_op, n_op, 60, 1);
    printf("by launch\n");
    print_rows(by_launch, n_launch, (int)option(argc, argv, "--top", 20), repeat);
    return 0;
}
