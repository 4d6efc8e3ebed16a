/* Trains MNIST with libgradd_train: mnist DATA FILES [EPOCHS]. */
#include <stdio.h>
#include <stdlib.h>

#include "train/gradd_train.h"

enum { PIXELS = 784, CLASSES = 10, ROWS = 64 };

typedef struct set_s {
    int64_t n;
    float *pictures; /* n times PIXELS, of 0 to 1 */
    int64_t *labels;
} set_t;

static void need(gradd_status_t status) {
    if (status == GRADD_OK) return;
    fprintf(stderr, "mnist: %s\n", gradd_error_message());
    exit(1);
}

/* The bytes of DATA/KIND-NAME behind its header. */
static unsigned char *read_bytes(const char *data, const char *kind, const char *name, size_t head,
                                 int64_t *out_n) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s-%s", data, kind, name);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) perror(path), exit(1);
    *out_n = ftell(file) - (long)head;
    fseek(file, (long)head, SEEK_SET);
    unsigned char *bytes = *out_n > 0 ? malloc((size_t)*out_n) : NULL;
    if (!bytes || fread(bytes, 1, (size_t)*out_n, file) != (size_t)*out_n) perror(path), exit(1);
    fclose(file);
    return bytes;
}

static set_t read_set(const char *data, const char *kind) {
    int64_t n;
    set_t set;
    unsigned char *pixels = read_bytes(data, kind, "images-idx3-ubyte", 16, &n);
    unsigned char *labels = read_bytes(data, kind, "labels-idx1-ubyte", 8, &set.n);
    if (n != set.n * PIXELS) fprintf(stderr, "mnist: the labels do not fit\n"), exit(1);
    set.pictures = malloc((size_t)n * sizeof *set.pictures);
    set.labels = malloc((size_t)set.n * sizeof *set.labels);
    for (int64_t i = 0; i < n; i++)
        set.pictures[i] = (float)pixels[i] / 255;
    for (int64_t i = 0; i < set.n; i++)
        set.labels[i] = labels[i];
    free(pixels);
    free(labels);
    return set;
}

/* Rows from `at` on, `rows` at most; returns how many. */
static int64_t batch(const set_t *set, int64_t at, int64_t rows, gradd_train_tensor_t out[2]) {
    const int64_t n = set->n - at < rows ? set->n - at : rows;
    out[0] =
        (gradd_train_tensor_t){{GRADD_DT_F32, 2, {n, PIXELS}}, set->pictures + at * PIXELS};
    out[1] = (gradd_train_tensor_t){{GRADD_DT_I64, 1, {n}}, set->labels + at};
    return n;
}

static double train(gradd_train_session_t *session, const set_t *set) {
    gradd_train_tensor_t inputs[2], outputs[2];
    double sum = 0;
    int steps = 0;
    for (int64_t at = 0; at < set->n; at += batch(set, at, ROWS, inputs), steps++) {
        batch(set, at, ROWS, inputs);
        need(gradd_train_step(session, inputs, 2, outputs, NULL));
        sum += *(const float *)outputs[0].data;
        need(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
    }
    return sum / steps;
}

static int64_t test(gradd_train_session_t *session, const set_t *set) {
    gradd_train_tensor_t inputs[2], outputs[2];
    int64_t right = 0;
    batch(set, 0, set->n, inputs);
    need(gradd_train_eval_step(session, inputs, 2, outputs, NULL));
    for (int64_t i = 0; i < set->n; i++) {
        const float *scores = (const float *)outputs[1].data + i * CLASSES;
        int best = 0;
        for (int k = 1; k < CLASSES; k++)
            if (scores[k] > scores[best]) best = k;
        right += best == set->labels[i];
    }
    return right;
}

int main(int argc, char **argv) {
    static char paths[5][1024];
    static const char *const names[] = {"checkpoint", "training_model.onnx", "eval_model.onnx",
                                        "optimizer_model.onnx", "mnist.onnx"};
    if (argc < 3) return fprintf(stderr, "usage: mnist DATA FILES [EPOCHS]\n"), 2;
    for (int i = 0; i < 5; i++)
        snprintf(paths[i], sizeof paths[i], "%s/%s", argv[2], names[i]);
    const set_t digits = read_set(argv[1], "train"), others = read_set(argv[1], "t10k");
    gradd_train_options_t options = {.training = {.path = paths[1]}, .eval = {.path = paths[2]}};
    const gradd_train_model_t optimizer = {.path = paths[3]};
    gradd_train_state_t *state;
    gradd_train_session_t *session;
    need(gradd_train_state_load(paths[0], &state));
    need(gradd_train_optimizer_load(&optimizer, &options.optimizer));
    need(gradd_train_open(state, &options, &session));
    for (int epoch = 1; epoch <= (argc > 3 ? atoi(argv[3]) : 1); epoch++) {
        const double loss = train(session, &digits);
        printf("epoch %d: loss %.4f, %lld of %lld right\n", epoch, loss,
               (long long)test(session, &others), (long long)others.n);
    }
    need(gradd_train_export(session, paths[4], (const char *const[]){"scores"}, 1));
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    return 0;
}
