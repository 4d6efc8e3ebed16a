/* What gradd.js calls: one training session (gradd_train.h) by numbers and addresses alone, since
 * JavaScript has no structs of C. An instance of the module has one session, and ends with it:
 * memory of WebAssembly goes back to the browser in no other way.
 *
 * Functions that can fail return a status; gradd_status_name and gradd_error_message explain it.
 */
#include <stdlib.h>
#include <string.h>

#include "platform/web.h"
#include "train/gradd_train.h"

#define EXPORT(name) __attribute__((export_name(#name))) name

/* What a session is made of, in this order; bytes of none are NULL. */
enum { CHECKPOINT, TRAINING, EVAL, OPTIMIZER, PARTS };

typedef struct web_bytes_s {
    const void *data;
    size_t n;
} web_bytes_t;

/* A tensor as JavaScript reads it: 32-bit numbers, one after the other. */
typedef struct web_tensor_s {
    int32_t dtype; /* as in ONNX */
    int32_t rank;
    int32_t bytes;
    const void *data;
    int32_t dims[GRADD_MAX_RANK];
} web_tensor_t;

typedef struct web_buffer_s {
    void *data; /* aligned, so that a step need not copy it */
    size_t room;
} web_buffer_t;

static gradd_train_state_t *state;
static gradd_train_session_t *session;
static gradd_train_tensor_t *inputs, *outputs;
static web_buffer_t *buffers; /* of inputs */
static web_tensor_t shown;

const char *EXPORT(web_status_name)(gradd_status_t status) {
    return gradd_status_name(status);
}

const char *EXPORT(web_error)(void) {
    return gradd_error_message();
}

const char *EXPORT(web_version)(void) {
    return gradd_version();
}

void *EXPORT(web_take)(size_t n) {
    return malloc(n + !n);
}

void EXPORT(web_give_back)(void *memory) {
    free(memory);
}

/* ---- a session ------------------------------------------------------------------------------- */

static int most(int (*count)(const gradd_train_session_t *, gradd_train_phase_t)) {
    const int a = count(session, GRADD_TRAIN_TRAINING), b = count(session, GRADD_TRAIN_EVAL);
    return a > b ? a : b;
}

static gradd_status_t make_places(void) {
    const size_t n_in = (size_t)most(gradd_train_input_count) + 1;
    inputs = calloc(n_in, sizeof *inputs);
    buffers = calloc(n_in, sizeof *buffers);
    outputs = calloc((size_t)most(gradd_train_output_count) + 1, sizeof *outputs);
    if (!inputs || !buffers || !outputs)
        return GRADD_FAIL(NOMEM, "no memory for inputs and outputs");
    return GRADD_OK;
}

/* parts: PARTS of them, not needed afterwards. memory_budget: bytes, 0 = what it takes. */
gradd_status_t EXPORT(web_open)(const web_bytes_t *parts, double memory_budget, uint32_t seed) {
    gradd_train_options_t options = {
        .training = {.bytes = parts[TRAINING].data, .n = parts[TRAINING].n},
        .eval = {.bytes = parts[EVAL].data,     .n = parts[EVAL].n    },
        .threads = 1,
        .memory_budget = (int64_t)memory_budget,
        .seed = seed,
    };
    const gradd_train_model_t optimizer = {.bytes = parts[OPTIMIZER].data, .n = parts[OPTIMIZER].n};
    GRADD_TRY(gradd_train_state_load_bytes(parts[CHECKPOINT].data, parts[CHECKPOINT].n, &state));
    if (optimizer.bytes) GRADD_TRY(gradd_train_optimizer_load(&optimizer, &options.optimizer));
    GRADD_TRY(gradd_train_open(state, &options, &session));
    return make_places();
}

/* Names of inputs or outputs of the model of a phase; NULL beyond the last one. */
const char *EXPORT(web_name)(gradd_train_phase_t phase, bool is_output, int i) {
    return is_output ? gradd_train_output_name(session, phase, i)
                     : gradd_train_input_name(session, phase, i);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void *room_for(web_buffer_t *buffer, int64_t bytes) {
    if (buffer->room >= (size_t)bytes && buffer->data) return buffer->data;
    const size_t room =
        ((size_t)bytes + GRADD_TENSOR_ALIGN) / GRADD_TENSOR_ALIGN * GRADD_TENSOR_ALIGN;
    free(buffer->data);
    buffer->data = aligned_alloc(GRADD_TENSOR_ALIGN, room);
    buffer->room = buffer->data ? room : 0;
    return buffer->data;
}

/* Says what input i of the next step is. *out_data: where its elements go. */
gradd_status_t EXPORT(web_input)(int i, int dtype, int rank, const int32_t *dims, void **out_data) {
    gradd_type_t type = {.rank = rank};
    GRADD_TRY(gradd_dtype_check(dtype, &type.dtype));
    for (int d = 0; d < rank && d < GRADD_MAX_RANK; d++)
        type.dims[d] = dims[d];
    GRADD_TRY(gradd_type_check(&type));
    const int64_t bytes = gradd_type_bytes(&type);
    if (bytes > INT32_MAX || !room_for(&buffers[i], bytes))
        return GRADD_FAIL(NOMEM, "no memory for an input of %lld bytes", (long long)bytes);
    inputs[i] = (gradd_train_tensor_t){type, buffers[i].data};
    *out_data = buffers[i].data;
    return GRADD_OK;
}

gradd_status_t EXPORT(web_step)(gradd_train_phase_t phase) {
    const int n = gradd_train_input_count(session, phase);
    return phase == GRADD_TRAIN_TRAINING ? gradd_train_step(session, inputs, n, outputs, NULL)
                                         : gradd_train_eval_step(session, inputs, n, outputs, NULL);
}

/* Output i of the last step. */
const web_tensor_t *EXPORT(web_output)(int i) {
    const gradd_type_t *type = &outputs[i].type;
    shown = (web_tensor_t){.dtype = (int32_t)type->dtype,
                           .rank = type->rank,
                           .bytes = (int32_t)gradd_type_bytes(type),
                           .data = outputs[i].data};
    for (int d = 0; d < type->rank; d++)
        shown.dims[d] = (int32_t)type->dims[d];
    return &shown;
}

void EXPORT(web_lazy_reset_grad)(void) {
    gradd_train_lazy_reset_grad(session);
}

gradd_status_t EXPORT(web_optimizer_step)(void) {
    return gradd_train_optimizer_step(session, NULL);
}

double EXPORT(web_optimizer_steps)(void) {
    return (double)gradd_train_state_progress(state).step;
}

float EXPORT(web_learning_rate)(void) {
    return gradd_train_learning_rate(session);
}

gradd_status_t EXPORT(web_set_learning_rate)(float rate) {
    return gradd_train_set_learning_rate(session, rate);
}

gradd_status_t EXPORT(web_set_linear_schedule)(double warmup, double total, float initial) {
    return gradd_train_set_linear_schedule(session, (int64_t)warmup, (int64_t)total, initial);
}

gradd_status_t EXPORT(web_schedule_step)(void) {
    return gradd_train_schedule_step(session);
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* NULL beyond the last one. */
const char *EXPORT(web_parameter_name)(bool trainable_only, int i) {
    const int at = gradd_train_parameter_index(session, trainable_only, i);
    return at < 0 ? NULL : gradd_train_state_parameter(state, at).name;
}

gradd_status_t EXPORT(web_parameters_size)(bool trainable_only, double *out_count) {
    int64_t count;
    GRADD_TRY(gradd_train_contiguous_count(session, trainable_only, &count));
    *out_count = (double)count;
    return GRADD_OK;
}

gradd_status_t EXPORT(web_copy_out)(bool trainable_only, float *buffer, int32_t count) {
    return gradd_train_copy_out(session, trainable_only, buffer, count);
}

gradd_status_t EXPORT(web_copy_in)(bool trainable_only, const float *buffer, int32_t bytes) {
    const int32_t count = bytes / (int32_t)sizeof *buffer;
    if (bytes % (int32_t)sizeof *buffer)
        return GRADD_FAIL(TENSOR, "%d bytes are no f32 numbers", bytes);
    return gradd_train_copy_in(session, trainable_only, buffer, count);
}

/* *out_changed: so many parameters that match were not so before. */
gradd_status_t EXPORT(web_choose)(bool trained, const char *pattern, int *out_changed) {
    return trained ? gradd_train_thaw(session, pattern, out_changed)
                   : gradd_train_freeze(session, pattern, out_changed);
}

/* Bytes, and plans: parameters, gradients, moments, arena, constants, buffers, plans. */
gradd_status_t EXPORT(web_memory)(double out[7]) {
    const gradd_train_memory_t memory = gradd_train_memory(session);
    const double all[] = {(double)memory.parameters, (double)memory.gradients,
                          (double)memory.moments,    (double)memory.arena,
                          (double)memory.constants,  (double)memory.buffers,
                          (double)memory.plans};
    memcpy(out, all, sizeof all);
    return GRADD_OK;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* These leave their bytes in web_written. */
gradd_status_t EXPORT(web_save)(bool with_optimizer) {
    return gradd_train_state_save(state, "checkpoint", with_optimizer);
}

/* names: n of them, one behind the NUL of the other. */
gradd_status_t EXPORT(web_export)(const char *names, int n) {
    const char **list = malloc(((size_t)n + 1) * sizeof *list);
    if (!list) return GRADD_FAIL(NOMEM, "no memory for the names of %d outputs", n);
    for (int i = 0; i < n; i++, names += strlen(names) + 1)
        list[i] = names;
    const gradd_status_t status = gradd_train_export(session, "model.onnx", list, n);
    free(list);
    return status;
}

const web_file_t *EXPORT(web_written)(void) {
    return web_file();
}

void EXPORT(web_forget)(void) {
    web_file_forget();
}
