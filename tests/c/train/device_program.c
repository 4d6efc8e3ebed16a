/* A program of a device: trains three small models with libgradd_train alone and prints the bits of
 * their losses, those of the third again with its state in a file, which is opened in between. The
 * same on every machine with fused multiply-add. Where malloc can be counted, it fails if a step
 * allocates that is not the first of its shape.
 *
 * It makes its ONNX models itself, so that it needs no other file and no other library.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/gradd_train.h"

/* ---- allocations ----------------------------------------------------------------------------- */

static long allocations;

#ifdef __GLIBC__
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t alignment, size_t n);

void *malloc(size_t n) {
    allocations++;
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size) {
    allocations++;
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n) {
    allocations++;
    return __libc_realloc(p, n);
}

void *aligned_alloc(size_t alignment, size_t n) {
    allocations++;
    return __libc_memalign(alignment, n);
}
#endif

static void check(gradd_status_t status, const char *what) {
    if (!status) return;
    printf("%s: %s: %s\n", what, gradd_status_name(status), gradd_error_message());
    exit(1);
}

/* ---- ONNX, as bytes -------------------------------------------------------------------------- */

typedef struct bytes_s {
    unsigned char at[16384];
    size_t n;
} bytes_t;

static void put_byte(bytes_t *b, unsigned value) {
    if (b->n == sizeof b->at) {
        printf("a model is too large\n");
        exit(1);
    }
    b->at[b->n++] = (unsigned char)value;
}

static void put_varint(bytes_t *b, unsigned long long value) {
    for (; value > 127; value >>= 7)
        put_byte(b, 128 | (value & 127));
    put_byte(b, (unsigned)value);
}

static void put_number(bytes_t *b, unsigned field, unsigned long long value) {
    put_varint(b, field << 3);
    put_varint(b, value);
}

static void put_bytes(bytes_t *b, unsigned field, const void *data, size_t n) {
    put_varint(b, field << 3 | 2);
    put_varint(b, n);
    for (size_t i = 0; i < n; i++)
        put_byte(b, ((const unsigned char *)data)[i]);
}

static void put_text(bytes_t *b, unsigned field, const char *text) {
    put_bytes(b, field, text, strlen(text));
}

static void put_message(bytes_t *b, unsigned field, const bytes_t *message) {
    put_bytes(b, field, message->at, message->n);
}

/* Numbers of fields in onnx.proto. */
enum { GRAPH_NODE = 1, GRAPH_INPUT = 11, GRAPH_OUTPUT = 12 };

static void put_value(bytes_t *graph, unsigned field, const char *name, const gradd_type_t *type) {
    bytes_t shape = {0}, tensor = {0}, kind = {0}, value = {0};
    for (int d = 0; type && d < type->rank; d++) {
        bytes_t dim = {0};
        if (type->dims[d] >= 0) put_number(&dim, 1, (unsigned long long)type->dims[d]);
        put_message(&shape, 1, &dim);
    }
    put_text(&value, 1, name);
    if (type) {
        put_number(&tensor, 1, (unsigned long long)type->dtype);
        put_message(&tensor, 2, &shape);
        put_message(&kind, 1, &tensor);
        put_message(&value, 2, &kind);
    }
    put_message(graph, field, &value);
}

static void put_names(bytes_t *node, unsigned field, const char *names) {
    while (*names) {
        const size_t n = strcspn(names, ",");
        put_bytes(node, field, names, n);
        names += n + (names[n] == ',');
    }
}

/* With one attribute of an integer, if there is a name of it. */
static void put_node(bytes_t *graph, const char *op, const char *in, const char *out,
                     const char *attribute, long long value) {
    bytes_t node = {0}, attr = {0};
    put_names(&node, 1, in);
    put_names(&node, 2, out);
    put_text(&node, 4, op);
    if (attribute) {
        put_text(&attr, 1, attribute);
        put_number(&attr, 3, (unsigned long long)value);
        put_number(&attr, 20, 2);
        put_message(&node, 5, &attr);
    }
    put_message(graph, GRAPH_NODE, &node);
}

static gradd_type_t type_of(gradd_dtype_t dtype, int rank, long long a, long long b) {
    return (gradd_type_t){
        .dtype = dtype, .rank = rank, .dims = {a, rank > 1 ? b : 0}
    };
}

/* ---- three networks -------------------------------------------------------------------------- */

enum { IN = 20, WIDTH = 24, CLASSES = 5, ROWS = 12, STEPS = 6 };

typedef struct network_s {
    const char *name;
    int layers; /* hidden ones */
    const char *activation;
    bool norms; /* batch norms */
} network_t;

static unsigned drawn = 1;

static float draw(void) {
    drawn = drawn * 1664525u + 1013904223u;
    return (float)(drawn >> 8) / (1 << 24) - 0.5f;
}

/* A parameter: an input of the model, and its values in the state. */
static void add_parameter(bytes_t *graph, gradd_train_state_t *state, const char *name,
                          gradd_type_t type, float spread) {
    static float values[WIDTH * WIDTH];
    const bool is_variance = strstr(name, ".var") || strstr(name, ".scale");
    for (int64_t i = 0; i < gradd_type_count(&type); i++)
        values[i] = spread * draw() + (is_variance ? 1 : 0);
    put_value(graph, GRAPH_INPUT, name, &type);
    check(gradd_train_state_add(state, name, &type, values,
                                !strstr(name, ".var") && !strstr(name, ".mean")),
          name);
}

static const char *text(char *to, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(to, 128, format, args);
    va_end(args);
    return to;
}

static void add_norm(bytes_t *graph, gradd_train_state_t *state, int layer) {
    static const char *const parts[] = {"scale", "bias", "mean", "var"};
    char name[128], in[128], out[128];
    for (int i = 0; i < 4; i++)
        add_parameter(graph, state, text(name, "n%d.%s", layer, parts[i]),
                      type_of(GRADD_DT_F32, 1, WIDTH, 0), 0);
    put_node(graph, "BatchNormalization",
             text(in, "h%d,n%d.scale,n%d.bias,n%d.mean,n%d.var", layer, layer, layer, layer, layer),
             text(out, "b%d,mean%d,var%d", layer, layer, layer), "training_mode", 1);
}

static void add_layer(bytes_t *graph, gradd_train_state_t *state, const network_t *net, int layer) {
    const bool last = layer == net->layers;
    const long long in_size = layer ? WIDTH : IN, out_size = last ? CLASSES : WIDTH;
    char w[128], b[128], in[512], out[128];
    add_parameter(graph, state, text(w, "w%d", layer), type_of(GRADD_DT_F32, 2, in_size, out_size),
                  0.8f);
    add_parameter(graph, state, text(b, "b.%d", layer), type_of(GRADD_DT_F32, 1, out_size, 0), 0);
    text(in, "r%d", layer - 1);
    text(in + strlen(in), ",%s,%s", w, b);
    if (!layer) text(in, "x,%s,%s", w, b);
    put_node(graph, "Gemm", in, text(out, last ? "logits" : "h%d", layer), NULL, 0);
    if (last) return;
    if (net->norms) add_norm(graph, state, layer);
    put_node(graph, net->activation, text(in, net->norms ? "b%d" : "h%d", layer),
             text(out, "r%d", layer), NULL, 0);
}

static void make_model(bytes_t *model, gradd_train_state_t *state, const network_t *net) {
    static bytes_t graph;
    bytes_t opset = {0};
    const gradd_type_t x = type_of(GRADD_DT_F32, 2, -1, IN), y = type_of(GRADD_DT_I64, 1, -1, 0);
    graph.n = model->n = 0;
    put_value(&graph, GRAPH_INPUT, "x", &x);
    put_value(&graph, GRAPH_INPUT, "labels", &y);
    for (int layer = 0; layer <= net->layers; layer++)
        add_layer(&graph, state, net, layer);
    put_node(&graph, "SoftmaxCrossEntropyLoss", "logits,labels", "loss", NULL, 0);
    put_text(&graph, 2, net->name);
    put_value(&graph, GRAPH_OUTPUT, "loss", NULL);
    put_number(&opset, 2, 17);
    put_number(model, 1, 8);
    put_message(model, 7, &graph);
    put_message(model, 8, &opset);
}

/* ---- training -------------------------------------------------------------------------------- */

static float step(gradd_train_session_t *session, int rows) {
    static float x[2 * ROWS * IN];
    static int64_t labels[2 * ROWS];
    gradd_train_tensor_t loss;
    const gradd_train_tensor_t inputs[] = {
        {type_of(GRADD_DT_F32, 2, rows, IN), x     },
        {type_of(GRADD_DT_I64, 1, rows, 0),  labels}
    };
    drawn = 7; /* the same rows in every step */
    for (int i = 0; i < rows * IN; i++)
        x[i] = 2 * draw();
    for (int i = 0; i < rows; i++)
        labels[i] = (x[i * IN] > 0) + 2 * (x[i * IN + 1] > 0);
    gradd_train_lazy_reset_grad(session);
    check(gradd_train_step(session, inputs, 2, &loss, NULL), "step");
    check(gradd_train_step(session, inputs, 2, &loss, NULL), "accumulation");
    check(gradd_train_optimizer_step(session, NULL), "optimizer");
    return *(const float *)loss.data;
}

typedef struct training_s {
    const network_t *net;
    gradd_train_options_t options;
    gradd_train_state_t *state;
    gradd_train_session_t *session;
    const char *file; /* of the state; NULL = it is in memory */
} training_t;

static void begin(training_t *t, bytes_t *model) {
    const gradd_train_lasting_t every_step = {.commit_every = 1};
    check(gradd_train_state_create(&t->state), t->net->name);
    make_model(model, t->state, t->net);
    t->options.training = (gradd_train_model_t){.bytes = model->at, .n = model->n};
    if (t->file) check(gradd_train_keep_state(t->state, t->file, &every_step), t->file);
    check(gradd_train_open(t->state, &t->options, &t->session), t->net->name);
    check(gradd_train_set_linear_schedule(t->session, 0, 4 * STEPS, 0.05f), t->net->name);
}

static void end(training_t *t) {
    gradd_train_close(t->session);
    gradd_train_state_destroy(t->state);
}

/* As if the device had been switched off in between. */
static void go_on(training_t *t) {
    const gradd_train_lasting_t every_step = {.commit_every = 1};
    check(gradd_train_commit(t->state), t->file);
    end(t);
    check(gradd_train_open_state(t->file, &every_step, &t->state), t->file);
    check(gradd_train_open(t->state, &t->options, &t->session), t->file);
}

/* The first losses of a shape make its plan. */
static int train(const network_t *net, gradd_train_optimizer_t optimizer, const char *file) {
    static bytes_t model;
    training_t t = {
        .net = net, .options = {.optimizer = optimizer, .threads = 1},
             .file = file
    };
    long before = 0, more = 0;
    begin(&t, &model);
    printf("%s", file ? "kept" : net->name);
    for (int i = 0; i < STEPS; i++) {
        unsigned bits;
        const float loss = step(t.session, i % 2 ? ROWS : 2 * ROWS);
        check(gradd_train_schedule_step(t.session), net->name);
        memcpy(&bits, &loss, sizeof bits);
        printf(" %08x", bits);
        const int steps = file ? i % (STEPS / 2) : i; /* of this session */
        if (steps == 1) before = allocations;
        if (steps > 1) more += allocations - before;
        if (file && i + 1 == STEPS / 2) go_on(&t);
    }
    printf("\n");
    fflush(stdout);
    end(&t);
    if (file) remove(file);
    if (more)
        printf("%s: %ld allocations after the first steps of their shapes\n", net->name, more);
    return more != 0;
}

int main(void) {
    static const network_t shallow = {"shallow", 1, "Relu", false};
    static const network_t deep = {"deep", 6, "Tanh", false};
    static const network_t norms = {"norms", 2, "Sigmoid", true};
    char file[64];
    gradd_train_optimizer_t momentum = gradd_train_sgd(), adam = gradd_train_adamw();
    momentum.momentum = 0.9;
    adam.max_norm = 1;
    snprintf(file, sizeof file, "/tmp/gradd-device-program-%ld", (long)getpid());
    printf("gradd %s\n", gradd_version()); /* the stream has its buffer */
    return train(&shallow, momentum, NULL) | train(&deep, adam, NULL) | train(&norms, adam, NULL) |
           train(&norms, adam, file);
}
