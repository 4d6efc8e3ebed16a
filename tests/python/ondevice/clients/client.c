/* A client's round: client FILES DATA RATE. FILES has artifacts, DATA the weights of all,
 * global.f32, and batches 0 and 1 as x0.f32 [rows, 4], y0.i64 [rows] and so on. Writes
 * DATA/update.f32, what has changed in the trained weights, and prints how many examples, and the
 * mean loss. */
#include <stdio.h>
#include <stdlib.h>

#include "train/gradd_train.h"

enum { IN = 4 };

static void need(gradd_status_t status) {
    if (status == GRADD_OK) return;
    fprintf(stderr, "client: %s\n", gradd_error_message());
    exit(1);
}

static const char *path_of(const char *folder, const char *name) {
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void *read_all(const char *folder, const char *name, size_t size, int64_t *out_n) {
    FILE *file = fopen(path_of(folder, name), "rb");
    char *bytes = malloc(1 << 16);
    if (!file || !bytes) perror(name), exit(1);
    *out_n = (int64_t)fread(bytes, size, (1 << 16) / size, file);
    fclose(file);
    return bytes;
}

static void train(gradd_train_session_t *session, const char *data, double *loss, int64_t *rows) {
    for (int k = 0; k < 2; k++) {
        char x[] = "x0.f32", y[] = "y0.i64";
        gradd_train_tensor_t outputs[2];
        int64_t n, n_labels;
        x[1] = y[1] = (char)('0' + k);
        float *values = read_all(data, x, sizeof *values, &n);
        int64_t *labels = read_all(data, y, sizeof *labels, &n_labels);
        const gradd_train_tensor_t inputs[] = {
            {{GRADD_DT_F32, 2, {n / IN, IN}}, values},
            {{GRADD_DT_I64, 1, {n_labels}},   labels},
        };
        need(gradd_train_step(session, inputs, 2, outputs, NULL));
        *loss += (double)n_labels * *(const float *)outputs[0].data;
        *rows += n_labels;
        need(gradd_train_optimizer_step(session, NULL));
        gradd_train_lazy_reset_grad(session);
        free(values);
        free(labels);
    }
}

int main(int argc, char **argv) {
    gradd_train_state_t *state;
    gradd_train_session_t *session;
    gradd_train_options_t options = {.training = {.path = NULL}};
    int64_t n, trained, rows = 0;
    double loss = 0;
    if (argc != 4) return 2;
    const gradd_train_model_t optimizer = {.path = path_of(argv[1], "optimizer_model.onnx")};
    need(gradd_train_optimizer_load(&optimizer, &options.optimizer));
    options.training.path = path_of(argv[1], "training_model.onnx");
    need(gradd_train_state_load(path_of(argv[1], "nominal_checkpoint"), &state));
    need(gradd_train_open(state, &options, &session));
    float *weights = read_all(argv[2], "global.f32", sizeof *weights, &n);
    need(gradd_train_copy_in(session, false, weights, n));
    need(gradd_train_contiguous_count(session, true, &trained));
    float *before = malloc((size_t)trained * sizeof *before), *after = weights;
    need(gradd_train_copy_out(session, true, before, trained));
    need(gradd_train_set_learning_rate(session, (float)atof(argv[3])));
    train(session, argv[2], &loss, &rows);
    need(gradd_train_copy_out(session, true, after, trained));
    for (int64_t i = 0; i < trained; i++)
        before[i] = after[i] - before[i];
    FILE *file = fopen(path_of(argv[2], "update.f32"), "wb");
    if (!file || fwrite(before, sizeof *before, (size_t)trained, file) != (size_t)trained) return 1;
    fclose(file);
    printf("%lld %.9g\n", (long long)rows, loss / (double)rows);
    gradd_train_close(session);
    gradd_train_state_destroy(state);
    free(before);
    free(weights);
    return 0;
}
