/* Where the time of a step goes, operator by operator, without daemon or Python.
 *
 *   bench_engine model.onnx [--device NAME] [--repeat N] [--threads N] [--top N] [--ids N]
 *                [--plain 1] [--step 1] [--json 1] [--data FOLDER] [--save FOLDER] input=2x3 ...
 *
 * Inputs whose shape the model leaves open are given on the command line. Floats are filled with
 * small values, integers with 0..N-1 of --ids (31) in turn, those of buffers with 0, booleans with
 * true. Trainable are all float inputs with a static shape (parameters). Prints the plan's sizes,
 * a table by operator, and the launches that take longest; with --step also the time of an AdamW
 * step of all parameters. --json prints each of these as a line of JSON.
 *
 * --data takes the bytes of every input from FOLDER/NAME.bin; --save writes the loss (loss.bin) and
 * the gradient of every parameter (NAME.bin) there, as the first round gives them.
 *
 * The tables come from rounds of their own: `best` is of rounds in which nothing is timed but the
 * whole. A launch's time is the shortest of all rounds: other processes only add to it. `launches
 * alone` is the sum of these. On a device with a queue each launch is waited for, which adds the
 * way there and back (10 us on a GPU) to each.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/math/bf16.h"
#include "server/device/device.h"
#include "server/exec/run.h"
#include "server/exec/step.h"

#define MAX_ROWS 512
#define FILLED   ((size_t)64 << 20) /* bytes of a tensor that are its own */

typedef struct row_s {
    char name[96];
    double seconds;
    long calls;
} row_t;

static row_t by_op[MAX_ROWS], by_launch[8192];
static int n_op, n_launch;
static bool json;

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

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    fprintf(stderr, "bench_engine: %s: %s\n", what, gradd_error_message());
    exit(1);
}

static void on_launch(void *context, const gradd_plan_t *plan, const plan_launch_t *launch,
                      double seconds) {
    char name[96], type[GRADD_TYPE_TEXT];
    const graph_node_t *n = launch->node < 0 ? NULL : &plan->graph->nodes[launch->node];
    const gradd_device_t *d = context;
    const double launched = now();
    if (d->backend->wait(d->queue, NULL)) die("a launch");
    seconds += now() - launched;
    if (d->backend->queue_enter(d->queue, 0)) die("a launch");
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
        printf(json ? "{\"ms\": %.4f, \"calls\": %.1f, \"row\": \"%s\"}\n"
                    : "  %9.3f ms  %6.1f calls  %s\n",
               rows[i].seconds * 1e3, (double)rows[i].calls / per, rows[i].name);
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

/* NULL: it is not given. */
static const char *text_option(int argc, char **argv, const char *name) {
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name)) return argv[i + 1];
    return NULL;
}

static long option(int argc, char **argv, const char *name, long otherwise) {
    const char *text = text_option(argc, argv, name);
    return text ? atol(text) : otherwise;
}

/* n elements of the type, from the i-th on. */
static void fill_host(void *data, const gradd_type_t *type, int64_t n, long ids) {
    for (int64_t i = 0; i < n; i++) {
        const float value = (float)((i * 7919) % 100003 - 50001) / 1e6f;
        if (type->dtype == GRADD_DT_F32)
            ((float *)data)[i] = value;
        else if (type->dtype == GRADD_DT_BF16)
            ((gradd_bf16_t *)data)[i] = gradd_f32_bf16(value);
        else if (type->dtype == GRADD_DT_I64)
            ((int64_t *)data)[i] = type->rank ? i * 7919 % ids : 100;
        else
            memset((char *)data + i * (int64_t)gradd_dtype_bytes(type->dtype), 1, 1);
    }
}

static void *take(gradd_device_t *d, size_t bytes) {
    void *memory;
    if (d->backend->alloc(d->queue, bytes, &memory)) die("memory");
    return memory;
}

static void put(gradd_device_t *d, void *to, const void *from, size_t bytes) {
    if (device_read(d, to, from, bytes)) die("a copy"); /* it copies either way */
}

/* FOLDER/NAME.bin, opened. */
static FILE *data_file(const char *folder, const char *name, const char *how) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    FILE *f = fopen(path, how);
    if (f) return f;
    fprintf(stderr, "bench_engine: %s cannot be opened\n", path);
    exit(1);
}

static void *read_data(gradd_device_t *d, const gradd_type_t *type, const char *folder,
                       const char *name) {
    const size_t bytes = (size_t)gradd_type_bytes(type);
    FILE *f = data_file(folder, name, "rb");
    char *from = malloc(bytes + 1);
    if (!from || fread(from, 1, bytes + 1, f) != bytes) {
        fprintf(stderr, "bench_engine: %s/%s.bin does not have %zu bytes\n", folder, name, bytes);
        exit(1);
    }
    fclose(f);
    void *to = take(d, bytes);
    put(d, to, from, bytes);
    free(from);
    return to;
}

static void save_data(gradd_device_t *d, const void *from, size_t bytes, const char *folder,
                      const char *name) {
    FILE *f = data_file(folder, name, "wb");
    char *here = malloc(bytes + 1);
    if (!here) die("memory");
    put(d, here, from, bytes);
    if (fwrite(here, 1, bytes, f) != bytes || fclose(f)) die("a file");
    free(here);
}

/* A tensor in memory of the device; a large one repeats its first elements. */
static void *fill(gradd_device_t *d, const gradd_type_t *type, long ids) {
    const size_t all = (size_t)gradd_type_bytes(type), part = all < FILLED ? all : FILLED;
    char *to = take(d, all), *from = malloc(part + 1);
    if (!from) die("memory");
    fill_host(from, type, (int64_t)(part / gradd_dtype_bytes(type->dtype)), ids);
    for (size_t at = 0; at < all; at += part)
        put(d, to + at, from, all - at < part ? all - at : part);
    free(from);
    return to;
}

static void *zeros(gradd_device_t *d, size_t bytes) {
    void *memory = take(d, bytes);
    if (d->backend->queue_enter(d->queue, 0) || d->backend->zero(d->queue, memory, bytes) ||
        d->backend->wait(d->queue, NULL))
        die("zeros");
    return memory;
}

/* ---- what is measured ---- */

typedef struct bench_s {
    gradd_device_t *device;
    gradd_plan_t *plan;
    int n_inputs, n_grads;
    gradd_type_t *types;
    int32_t *grads;
    const void **inputs;
    void **slots;
    bool *written;
    void *loss, *seed; /* of the device */
    bool narrow;       /* they are bf16 */
    double forward_ms, backward_ms;
} bench_t;

static void make_tensors(bench_t *b, const gradd_model_t *model, int argc, char **argv) {
    const size_t n = (size_t)gradd_model_n_inputs(model);
    const long ids = option(argc, argv, "--ids", 31);
    const char *data = text_option(argc, argv, "--data");
    b->n_inputs = (int)n;
    b->types = calloc(n + 1, sizeof b->types[0]);
    b->grads = calloc(n + 1, sizeof b->grads[0]);
    b->inputs = calloc(n + 1, sizeof b->inputs[0]);
    b->slots = calloc(n + 1, sizeof b->slots[0]);
    b->written = calloc(n + 1, sizeof b->written[0]);
    for (int i = 0; i < b->n_inputs; i++) {
        const char *name = gradd_model_input_name(model, i);
        b->types[i] = gradd_model_input_type(model, i);
        const bool given = shape_argument(argc, argv, name, &b->types[i]);
        b->inputs[i] = data ? read_data(b->device, &b->types[i], data, name)
                            : fill(b->device, &b->types[i], given ? ids : 1);
        if (given || !gradd_dtype_is_float(b->types[i].dtype)) continue;
        b->slots[b->n_grads] = zeros(b->device, (size_t)gradd_type_bytes(&b->types[i]));
        b->grads[b->n_grads++] = i;
    }
}

static void make_plan(bench_t *b, gradd_model_t *model, bool plain) {
    static int32_t out = 0;
    gradd_plan_options_t options = {.inputs = b->types,
                                    .n_inputs = b->n_inputs,
                                    .grads = b->grads,
                                    .n_grads = b->n_grads,
                                    .outputs = &out,
                                    .n_outputs = 1,
                                    .grad_outputs = &out,
                                    .n_grad_outputs = 1,
                                    .flags = plain ? GRADD_PLAN_PLAIN : 0,
                                    .device = b->device};
    if (gradd_plan_create(model, &options, &b->plan)) die("plan");
    const gradd_plan_info_t *info = gradd_plan_info(b->plan);
    printf(json ? "{\"plan_ms\": %.1f, \"arena_mb\": %.1f, \"saved_mb\": %.1f, "
                  "\"constants_mb\": %.1f, \"forward_launches\": %d, \"backward_launches\": %d}\n"
                : "plan: %.1f ms, arena %.1f MB, saved %.1f MB, constants %.1f MB, %d + %d nodes\n",
           info->compile_ms, (double)info->arena_bytes / 1e6, (double)info->saved_bytes / 1e6,
           (double)info->constant_bytes / 1e6, info->n_launches_forward, info->n_launches_backward);
    const float one = 1;
    const gradd_bf16_t one_bf16 = gradd_f32_bf16(1);
    b->narrow = info->outputs[0].dtype == GRADD_DT_BF16;
    b->loss = take(b->device, sizeof one);
    b->seed = take(b->device, sizeof one);
    put(b->device, b->seed, b->narrow ? (const void *)&one_bf16 : &one, b->narrow ? 2 : 4);
}

static double read_loss(const bench_t *b) {
    float loss = 0;
    gradd_bf16_t loss_bf16;
    put(b->device, b->narrow ? (void *)&loss_bf16 : &loss, b->loss, b->narrow ? 2 : 4);
    return (double)(b->narrow ? gradd_bf16_f32(loss_bf16) : loss);
}

/* One forward and backward, in seconds. */
static double round_once(bench_t *b) {
    gradd_run_t *run;
    const void *seeds[1] = {b->seed};
    void *outputs[1] = {b->loss};
    const double start = now();
    if (gradd_run_create(b->plan, &run)) die("run");
    if (gradd_run_forward(run, 1, 0, b->inputs, outputs, NULL)) die("forward");
    const double middle = now();
    if (gradd_run_backward(run, seeds, b->slots, false, b->written, NULL)) die("backward");
    const double end = now();
    gradd_run_destroy(run);
    b->forward_ms = (middle - start) * 1e3;
    b->backward_ms = (end - middle) * 1e3;
    if (!json)
        printf("  forward %.2f ms, backward %.2f ms, loss %g\n", b->forward_ms, b->backward_ms,
               read_loss(b));
    return end - start;
}

/* The shortest of some rounds, behind one that warms up. */
static void time_rounds(bench_t *b, int repeat) {
    double best = 1e9, parts[2] = {0, 0};
    for (int r = 0; r < repeat; r++) {
        const double seconds = round_once(b);
        if (seconds >= best) continue;
        best = seconds;
        parts[0] = b->forward_ms;
        parts[1] = b->backward_ms;
    }
    printf(json ? "{\"best_ms\": %.3f, \"forward_ms\": %.3f, \"backward_ms\": %.3f, \"loss\": %g}\n"
                : "best %.2f ms: forward %.2f, backward %.2f; loss %g\n",
           best * 1e3, parts[0], parts[1], read_loss(b));
}

static void save_all(const bench_t *b, const gradd_model_t *model, const char *folder) {
    save_data(b->device, b->loss, b->narrow ? 2 : 4, folder, "loss");
    for (int i = 0; i < b->n_grads; i++)
        if (b->written[i])
            save_data(b->device, b->slots[i], (size_t)gradd_type_bytes(&b->types[b->grads[i]]),
                      folder, gradd_model_input_name(model, b->grads[i]));
}

/* What the tensors take, and of the whole device's memory what is not free. */
static void print_memory(const bench_t *b) {
    int64_t left = 0, total = 0;
    double inputs = 0, grads = 0;
    for (int i = 0; i < b->n_inputs; i++)
        inputs += (double)gradd_type_bytes(&b->types[i]);
    for (int i = 0; i < b->n_grads; i++)
        grads += (double)gradd_type_bytes(&b->types[b->grads[i]]);
    if (b->device->backend->memory && b->device->backend->memory(&left, &total)) die("memory");
    printf(json ? "{\"inputs_mb\": %.1f, \"gradients_mb\": %.1f, \"device_used_mb\": %.1f}\n"
                : "inputs %.1f MB, gradients %.1f MB, used of the device %.1f MB\n",
           inputs / 1e6, grads / 1e6, (double)(total - left) / 1e6);
}

static void step_all(bench_t *b, int repeat) {
    const gradd_adam_t adam = {.lr = 1e-5,
                               .beta1 = 0.9,
                               .beta2 = 0.999,
                               .eps = 1e-8,
                               .mode = GRADD_ADAMW_TORCH,
                               .bias_correction = true,
                               .step = 1};
    step_tensor_t *tensors = calloc((size_t)b->n_grads + 1, sizeof tensors[0]);
    int64_t all = 0;
    for (int i = 0; i < b->n_grads; i++) {
        const gradd_type_t *type = &b->types[b->grads[i]];
        const int64_t n = gradd_type_count(type);
        float *m = zeros(b->device, 4 * (size_t)n), *v = zeros(b->device, 4 * (size_t)n);
        tensors[i] = (step_tensor_t){.p = (void *)b->inputs[b->grads[i]],
                                     .m = m,
                                     .v = v,
                                     .g = b->slots[i],
                                     .n = n,
                                     .dtype = type->dtype};
        all += n;
    }
    step_request_t request = {.tensors = tensors,
                              .n_tensors = b->n_grads,
                              .groups = &adam,
                              .n_groups = 1,
                              .max_norm = 1,
                              .journal = zeros(b->device, STEP_JOURNAL_BYTES),
                              .journal_bytes = STEP_JOURNAL_BYTES};
    double best = 1e9, norm;
    for (int i = 0; i < repeat; i++) {
        bool skipped;
        const double start = now();
        request.step = (uint64_t)i;
        if (step_apply(b->device, &request, &norm, &skipped)) die("step");
        if (now() - start < best) best = now() - start;
    }
    printf(json ? "{\"adamw_millions\": %.1f, \"adamw_ms\": %.3f, \"norm\": %g}\n"
                : "AdamW step of %.1f million elements: best %.2f ms, norm %g\n",
           (double)all / 1e6, best * 1e3, norm);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_engine model.onnx [--device NAME] [--repeat N] input=2x3\n");
        return 2;
    }
    size_t bytes;
    json = option(argc, argv, "--json", 0);
    void *file = read_file(argv[1], &bytes);
    gradd_model_t *model;
    if (gradd_model_load(file, bytes, &model)) die("load");
    const gradd_device_options_t with = {.name = text_option(argc, argv, "--device"),
                                         .threads = (int)option(argc, argv, "--threads", 0)};
    bench_t b = {0};
    if (gradd_device_open(&with, &b.device)) die("device");
    make_tensors(&b, model, argc, argv);
    make_plan(&b, model, option(argc, argv, "--plain", 0));
    const int repeat = (int)option(argc, argv, "--repeat", 5);
    const char *save = text_option(argc, argv, "--save");
    round_once(&b); /* which warms up */
    if (save) save_all(&b, model, save);
    if (!repeat) return 0;
    time_rounds(&b, repeat);
    print_memory(&b);
    if (option(argc, argv, "--step", 0)) step_all(&b, repeat);
    device_set_hook(b.device, on_launch, b.device);
    for (int r = 0; r < repeat; r++)
        round_once(&b);
    const double alone = sum_by_operator() * 1e3;
    printf(json ? "{\"launches_alone_ms\": %.3f}\n" : "launches alone %.2f ms\nby operator\n",
           alone);
    print_rows(by_op, n_op, 60, 1);
    if (json) return 0;
    printf("by launch\n");
    print_rows(by_launch, n_launch, (int)option(argc, argv, "--top", 20), repeat);
    return 0;
}
