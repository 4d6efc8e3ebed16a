/* gradd_train_jni.c - the native half of ai.gradd.train: each method of Native.java calls the
 * function of gradd_train.h that it is named for.
 *
 * The compiler compares these functions with Native.java: javac writes their declarations, which
 * the build includes. Java has made sure of what could end the process: handles are open, one
 * thread at a time uses them, texts end with a zero, buffers are direct and have as many bytes as
 * their types say. A failure becomes a TrainException; a method that returns with an exception
 * pending returns what nothing reads. Local references are given back inside loops, as Android has
 * room for 512.
 */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include "train/gradd_train.h"

#define NATIVE(type, name) JNIEXPORT type JNICALL Java_ai_gradd_train_Native_##name
#define STATE(handle)      ((gradd_train_state_t *)(intptr_t)(handle))
#define SESSION(handle)    ((gradd_train_session_t *)(intptr_t)(handle))

/* ---- values ---------------------------------------------------------------------------------- */

static jbyteArray bytes_of(JNIEnv *env, const char *text) {
    const jsize n = (jsize)strlen(text);
    jbyteArray bytes = (*env)->NewByteArray(env, n);
    if (bytes) (*env)->SetByteArrayRegion(env, bytes, 0, n, (const jbyte *)text);
    return bytes;
}

static void throw_text(JNIEnv *env, const char *status, const char *sentence) {
    jclass class = (*env)->FindClass(env, "ai/gradd/train/TrainException");
    jmethodID make = class ? (*env)->GetMethodID(env, class, "<init>", "([B[B)V") : NULL;
    jbyteArray a = make ? bytes_of(env, status) : NULL;
    jbyteArray b = a ? bytes_of(env, sentence) : NULL;
    jobject thrown = b ? (*env)->NewObject(env, class, make, a, b) : NULL;
    if (thrown) (*env)->Throw(env, thrown);
}

static bool check(JNIEnv *env, gradd_status_t status) {
    if (status != GRADD_OK) throw_text(env, gradd_status_name(status), gradd_error_message());
    return status == GRADD_OK;
}

static void no_memory(JNIEnv *env) {
    throw_text(env, gradd_status_name(GRADD_E_NOMEM), "out of memory");
}

/* A copy that the caller frees. NULL: of null, with an exception pending otherwise. */
static char *copy_of(JNIEnv *env, jbyteArray bytes) {
    if (!bytes || (*env)->ExceptionCheck(env)) return NULL;
    const jsize n = (*env)->GetArrayLength(env, bytes);
    char *copy = malloc((size_t)n + 1); /* some have no bytes */
    if (copy)
        (*env)->GetByteArrayRegion(env, bytes, 0, n, (jbyte *)copy);
    else
        no_memory(env);
    return copy;
}

static gradd_type_t type_of(JNIEnv *env, jlongArray typed) {
    jlong numbers[1 + GRADD_MAX_RANK];
    gradd_type_t type = {0};
    type.rank = (int)(*env)->GetArrayLength(env, typed) - 1;
    /* Of too high a rank the library sees the rank, and refuses it by that. */
    const jsize n = type.rank > GRADD_MAX_RANK ? GRADD_MAX_RANK : type.rank;
    (*env)->GetLongArrayRegion(env, typed, 0, n + 1, numbers);
    type.dtype = (gradd_dtype_t)numbers[0];
    for (jsize i = 0; i < n; i++)
        type.dims[i] = numbers[1 + i];
    return type;
}

static jlongArray longs_of(JNIEnv *env, const jlong *values, jsize n) {
    jlongArray array = (*env)->NewLongArray(env, n);
    if (array) (*env)->SetLongArrayRegion(env, array, 0, n, values);
    return array;
}

static jlongArray typed_of(JNIEnv *env, const gradd_type_t *type) {
    jlong numbers[1 + GRADD_MAX_RANK] = {(jlong)type->dtype};
    for (int i = 0; i < type->rank; i++)
        numbers[1 + i] = type->dims[i];
    return longs_of(env, numbers, 1 + (type->rank > 0 ? type->rank : 0));
}

/* Memory of the library as a buffer; null for NULL. */
static jobject memory_of(JNIEnv *env, const void *data, const gradd_type_t *type) {
    if (!data) return NULL;
    const int64_t n = gradd_type_bytes(type);
    if (n > INT32_MAX) {
        throw_text(env, gradd_status_name(GRADD_E_LIMIT), "a tensor of 2 GiB or more in Java");
        return NULL;
    }
    return (*env)->NewDirectByteBuffer(env, (void *)(uintptr_t)data, n);
}

/* An array of n objects of a class. */
static jobjectArray objects(JNIEnv *env, const char *name, jsize n) {
    jclass class = (*env)->FindClass(env, name);
    return class ? (*env)->NewObjectArray(env, n, class, NULL) : NULL;
}

static void put(JNIEnv *env, jobjectArray array, jsize i, jobject value) {
    if ((*env)->ExceptionCheck(env)) return;
    (*env)->SetObjectArrayElement(env, array, i, value);
    (*env)->DeleteLocalRef(env, value);
}

NATIVE(jbyteArray, version)(JNIEnv *env, jclass class) {
    (void)class;
    return bytes_of(env, gradd_version());
}

/* ---- state ----------------------------------------------------------------------------------- */

NATIVE(jlong, create)(JNIEnv *env, jclass class) {
    (void)class;
    gradd_train_state_t *state = NULL;
    check(env, gradd_train_state_create(&state));
    return (jlong)(intptr_t)state;
}

NATIVE(jlong, load)(JNIEnv *env, jclass class, jbyteArray path) {
    (void)class;
    gradd_train_state_t *state = NULL;
    char *text = copy_of(env, path);
    if (text) check(env, gradd_train_state_load(text, &state));
    free(text);
    return (jlong)(intptr_t)state;
}

NATIVE(jlong, loadBytes)(JNIEnv *env, jclass class, jbyteArray bytes) {
    (void)class;
    gradd_train_state_t *state = NULL;
    const size_t n = (size_t)(*env)->GetArrayLength(env, bytes);
    char *copy = copy_of(env, bytes);
    if (copy) check(env, gradd_train_state_load_bytes(copy, n, &state));
    free(copy);
    return (jlong)(intptr_t)state;
}

NATIVE(jlong, openState)
(JNIEnv *env, jclass class, jbyteArray path, jbyteArray checkpoint, jlong every, jlong ms) {
    (void)class;
    gradd_train_state_t *state = NULL;
    char *at = copy_of(env, path), *from = copy_of(env, checkpoint);
    const gradd_train_lasting_t how = {from, every, ms};
    if (!(*env)->ExceptionCheck(env)) check(env, gradd_train_open_state(at, &how, &state));
    free(from);
    free(at);
    return (jlong)(intptr_t)state;
}

NATIVE(void, keepState)
(JNIEnv *env, jclass class, jlong state, jbyteArray path, jlong every, jlong ms) {
    (void)class;
    char *text = copy_of(env, path);
    const gradd_train_lasting_t how = {NULL, every, ms};
    if (text) check(env, gradd_train_keep_state(STATE(state), text, &how));
    free(text);
}

NATIVE(void, commit)(JNIEnv *env, jclass class, jlong state) {
    (void)class;
    check(env, gradd_train_commit(STATE(state)));
}

NATIVE(void, save)
(JNIEnv *env, jclass class, jlong state, jbyteArray path, jboolean with_optimizer) {
    (void)class;
    char *text = copy_of(env, path);
    if (text) check(env, gradd_train_state_save(STATE(state), text, with_optimizer));
    free(text);
}

NATIVE(void, destroy)(JNIEnv *env, jclass class, jlong state) {
    (void)env, (void)class;
    gradd_train_state_destroy(STATE(state));
}

NATIVE(void, add)
(JNIEnv *env, jclass class, jlong state, jbyteArray name, jlongArray typed, jobject data,
 jboolean trainable) {
    (void)class;
    const gradd_type_t type = type_of(env, typed);
    const void *values = (*env)->GetDirectBufferAddress(env, data);
    char *text = copy_of(env, name);
    if (text) check(env, gradd_train_state_add(STATE(state), text, &type, values, trainable));
    free(text);
}

NATIVE(void, write)
(JNIEnv *env, jclass class, jlong state, jint i, jlongArray typed, jobject data) {
    (void)class;
    const gradd_type_t type = type_of(env, typed);
    const void *values = (*env)->GetDirectBufferAddress(env, data);
    check(env, gradd_train_state_write(STATE(state), i, &type, values));
}

NATIVE(jint, parameterCount)(JNIEnv *env, jclass class, jlong state) {
    (void)env, (void)class;
    return gradd_train_state_count(STATE(state));
}

NATIVE(jint, findParameter)(JNIEnv *env, jclass class, jlong state, jbyteArray name) {
    (void)class;
    char *text = copy_of(env, name);
    const int i = text ? gradd_train_state_find(STATE(state), text) : -1;
    free(text);
    return i;
}

NATIVE(jobjectArray, parameter)(JNIEnv *env, jclass class, jlong state, jint i) {
    (void)class;
    const gradd_train_parameter_t p = gradd_train_state_parameter(STATE(state), i);
    const jlong trainable = p.trainable;
    jobjectArray parts = objects(env, "java/lang/Object", 5);
    if (!parts) return NULL;
    put(env, parts, 0, bytes_of(env, p.name));
    put(env, parts, 1, typed_of(env, &p.type));
    put(env, parts, 2, memory_of(env, p.data, &p.type));
    put(env, parts, 3, memory_of(env, p.gradient, &p.type));
    put(env, parts, 4, longs_of(env, &trainable, 1));
    return parts;
}

NATIVE(jlongArray, progress)(JNIEnv *env, jclass class, jlong state) {
    (void)class;
    const gradd_train_progress_t progress = gradd_train_state_progress(STATE(state));
    const jlong numbers[] = {progress.step, progress.position};
    return longs_of(env, numbers, 2);
}

NATIVE(void, setPosition)(JNIEnv *env, jclass class, jlong state, jlong position) {
    (void)env, (void)class;
    gradd_train_state_set_position(STATE(state), position);
}

NATIVE(void, setProperty)
(JNIEnv *env, jclass class, jlong state, jbyteArray name, jint kind, jlong value, jbyteArray text) {
    (void)class;
    const int32_t bits = (int32_t)value;
    char *named = copy_of(env, name), *words = copy_of(env, text);
    gradd_train_property_t property = {named, (gradd_train_property_kind_t)kind, value, 0, words};
    if (kind == GRADD_TRAIN_FLOAT) memcpy(&property.real, &bits, sizeof bits);
    if (!(*env)->ExceptionCheck(env))
        check(env, gradd_train_state_set_property(STATE(state), &property));
    free(words);
    free(named);
}

NATIVE(jobjectArray, property)(JNIEnv *env, jclass class, jlong state, jbyteArray name) {
    (void)class;
    char *text = copy_of(env, name);
    const int i = text ? gradd_train_state_find_property(STATE(state), text) : -1;
    free(text);
    jobjectArray parts = i < 0 ? NULL : objects(env, "java/lang/Object", 2);
    if (!parts) return NULL;
    const gradd_train_property_t property = gradd_train_state_property(STATE(state), i);
    int32_t bits;
    memcpy(&bits, &property.real, sizeof bits);
    const jlong numbers[] = {property.kind,
                             property.kind == GRADD_TRAIN_FLOAT ? bits : property.integer};
    put(env, parts, 0, longs_of(env, numbers, 2));
    put(env, parts, 1, bytes_of(env, property.text));
    return parts;
}

/* ---- optimizer: {kind, mode, bias correction, beta1, beta2, eps, momentum, weight decay, norm} -
 */

#define CONSTANTS 9

static jdoubleArray constants_of(JNIEnv *env, const gradd_train_optimizer_t *o) {
    const jdouble values[CONSTANTS] = {o->kind,     o->mode,         o->bias_correction,
                                       o->beta1,    o->beta2,        o->eps,
                                       o->momentum, o->weight_decay, o->max_norm};
    jdoubleArray array = (*env)->NewDoubleArray(env, CONSTANTS);
    if (array) (*env)->SetDoubleArrayRegion(env, array, 0, CONSTANTS, values);
    return array;
}

static gradd_train_optimizer_t optimizer_of(JNIEnv *env, jdoubleArray constants) {
    jdouble v[CONSTANTS] = {GRADD_TRAIN_NO_OPTIMIZER};
    if (constants) (*env)->GetDoubleArrayRegion(env, constants, 0, CONSTANTS, v);
    return (gradd_train_optimizer_t){.kind = (gradd_train_optimizer_kind_t)v[0],
                                     .mode = (gradd_adam_mode_t)v[1],
                                     .bias_correction = v[2] != 0,
                                     .beta1 = v[3],
                                     .beta2 = v[4],
                                     .eps = v[5],
                                     .momentum = v[6],
                                     .weight_decay = v[7],
                                     .max_norm = v[8]};
}

NATIVE(jdoubleArray, defaults)(JNIEnv *env, jclass class, jboolean sgd) {
    (void)class;
    const gradd_train_optimizer_t made = sgd ? gradd_train_sgd() : gradd_train_adamw();
    return constants_of(env, &made);
}

NATIVE(jdoubleArray, loadOptimizer)
(JNIEnv *env, jclass class, jbyteArray path, jbyteArray bytes) {
    (void)class;
    gradd_train_optimizer_t loaded;
    const size_t n = bytes ? (size_t)(*env)->GetArrayLength(env, bytes) : 0;
    char *at = copy_of(env, path), *copy = copy_of(env, bytes);
    const gradd_train_model_t model = {copy, n, at};
    const bool done =
        !(*env)->ExceptionCheck(env) && check(env, gradd_train_optimizer_load(&model, &loaded));
    free(copy);
    free(at);
    return done ? constants_of(env, &loaded) : NULL;
}

/* ---- session --------------------------------------------------------------------------------- */

NATIVE(jlong, open)
(JNIEnv *env, jclass class, jlong state, jobjectArray models, jdoubleArray constants,
 jlongArray numbers) {
    (void)class;
    jlong n[4];
    (*env)->GetLongArrayRegion(env, numbers, 0, 4, n);
    char *texts[4] = {NULL}; /* path and bytes of training, then of eval */
    size_t sizes[4] = {0};
    const gradd_train_optimizer_t optimizer = optimizer_of(env, constants);
    for (jsize i = 0; i < 4 && !(*env)->ExceptionCheck(env); i++) {
        jbyteArray bytes = (*env)->GetObjectArrayElement(env, models, i);
        if (bytes) sizes[i] = (size_t)(*env)->GetArrayLength(env, bytes);
        texts[i] = copy_of(env, bytes);
    }
    const gradd_train_options_t options = {
        .training = {texts[1], sizes[1], texts[0]},
        .eval = {texts[3], sizes[3], texts[2]},
        .optimizer = optimizer,
        .threads = (int)n[0],
        .max_plans = (int)n[1],
        .memory_budget = n[2],
        .seed = (uint64_t)n[3]
    };
    gradd_train_session_t *session = NULL;
    if (!(*env)->ExceptionCheck(env))
        check(env, gradd_train_open(STATE(state), &options, &session));
    for (int i = 0; i < 4; i++)
        free(texts[i]);
    return (jlong)(intptr_t)session;
}

NATIVE(void, close)(JNIEnv *env, jclass class, jlong session) {
    (void)env, (void)class;
    gradd_train_close(SESSION(session));
}

static gradd_train_phase_t phase_of(jboolean eval) {
    return eval ? GRADD_TRAIN_EVAL : GRADD_TRAIN_TRAINING;
}

NATIVE(jobjectArray, names)
(JNIEnv *env, jclass class, jlong session, jboolean eval, jboolean outputs) {
    (void)class;
    const gradd_train_phase_t phase = phase_of(eval);
    const int n = outputs ? gradd_train_output_count(SESSION(session), phase)
                          : gradd_train_input_count(SESSION(session), phase);
    jobjectArray names = objects(env, "[B", n);
    for (int i = 0; names && i < n; i++)
        put(env, names, i,
            bytes_of(env, outputs ? gradd_train_output_name(SESSION(session), phase, i)
                                  : gradd_train_input_name(SESSION(session), phase, i)));
    return names;
}

static jobjectArray outputs_of(JNIEnv *env, const gradd_train_tensor_t *outputs, int n) {
    static const char nothing; /* the address of an output without elements */
    jobjectArray parts = objects(env, "java/lang/Object", 2 * n);
    for (int i = 0; parts && i < n; i++) {
        const void *data = outputs[i].data ? outputs[i].data : &nothing;
        put(env, parts, 2 * i, typed_of(env, &outputs[i].type));
        put(env, parts, 2 * i + 1, memory_of(env, data, &outputs[i].type));
    }
    return parts;
}

NATIVE(jobjectArray, step)
(JNIEnv *env, jclass class, jlong session, jboolean eval, jobjectArray types, jobjectArray data,
 jobject terminate) {
    (void)class;
    const jsize n = (*env)->GetArrayLength(env, types);
    const int n_outputs = gradd_train_output_count(SESSION(session), phase_of(eval));
    const volatile int *cancel = (*env)->GetDirectBufferAddress(env, terminate);
    gradd_train_tensor_t *inputs = calloc((size_t)n + (size_t)n_outputs + 1, sizeof *inputs);
    if (!inputs) {
        no_memory(env);
        return NULL;
    }
    for (jsize i = 0; i < n; i++) {
        jobject type = (*env)->GetObjectArrayElement(env, types, i);
        jobject buffer = (*env)->GetObjectArrayElement(env, data, i);
        inputs[i].type = type_of(env, type);
        inputs[i].data = (*env)->GetDirectBufferAddress(env, buffer);
        (*env)->DeleteLocalRef(env, buffer);
        (*env)->DeleteLocalRef(env, type);
    }
    gradd_train_tensor_t *outputs = inputs + n;
    const bool done = check(env, (eval ? gradd_train_eval_step : gradd_train_step)(
                                     SESSION(session), inputs, (int)n, outputs, cancel));
    jobjectArray parts = done ? outputs_of(env, outputs, n_outputs) : NULL;
    free(inputs);
    return parts;
}

NATIVE(void, setTerminate)(JNIEnv *env, jclass class, jobject terminate, jboolean value) {
    (void)class;
    int *flag = (*env)->GetDirectBufferAddress(env, terminate);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

NATIVE(void, lazyResetGrad)(JNIEnv *env, jclass class, jlong session) {
    (void)env, (void)class;
    gradd_train_lazy_reset_grad(SESSION(session));
}

NATIVE(jdouble, optimizerStep)(JNIEnv *env, jclass class, jlong session) {
    (void)class;
    double norm = 0;
    check(env, gradd_train_optimizer_step(SESSION(session), &norm));
    return norm;
}

NATIVE(jfloat, learningRate)(JNIEnv *env, jclass class, jlong session) {
    (void)env, (void)class;
    return gradd_train_learning_rate(SESSION(session));
}

NATIVE(void, setLearningRate)(JNIEnv *env, jclass class, jlong session, jfloat rate) {
    (void)class;
    check(env, gradd_train_set_learning_rate(SESSION(session), rate));
}

NATIVE(void, linearSchedule)
(JNIEnv *env, jclass class, jlong session, jlong warmup, jlong total, jfloat initial) {
    (void)class;
    check(env, gradd_train_set_linear_schedule(SESSION(session), warmup, total, initial));
}

NATIVE(void, scheduleStep)(JNIEnv *env, jclass class, jlong session) {
    (void)class;
    check(env, gradd_train_schedule_step(SESSION(session)));
}

NATIVE(void, setSeed)(JNIEnv *env, jclass class, jlong session, jlong seed) {
    (void)env, (void)class;
    gradd_train_set_seed(SESSION(session), (uint64_t)seed);
}

NATIVE(jint, select)
(JNIEnv *env, jclass class, jlong session, jbyteArray pattern, jboolean thaw) {
    (void)class;
    int changed = 0;
    char *text = copy_of(env, pattern);
    if (text)
        check(env,
              (thaw ? gradd_train_thaw : gradd_train_freeze)(SESSION(session), text, &changed));
    free(text);
    return changed;
}

NATIVE(jlong, contiguousCount)(JNIEnv *env, jclass class, jlong session, jboolean trainable) {
    (void)class;
    int64_t count = 0;
    check(env, gradd_train_contiguous_count(SESSION(session), trainable, &count));
    return count;
}

NATIVE(void, copyOut)
(JNIEnv *env, jclass class, jlong session, jboolean trainable, jfloatArray buffer) {
    (void)class;
    const jsize n = (*env)->GetArrayLength(env, buffer);
    jfloat *values = (*env)->GetFloatArrayElements(env, buffer, NULL);
    if (!values) return;
    const gradd_status_t status = gradd_train_copy_out(SESSION(session), trainable, values, n);
    (*env)->ReleaseFloatArrayElements(env, buffer, values, 0);
    check(env, status);
}

NATIVE(void, copyIn)
(JNIEnv *env, jclass class, jlong session, jboolean trainable, jfloatArray buffer) {
    (void)class;
    const jsize n = (*env)->GetArrayLength(env, buffer);
    jfloat *values = (*env)->GetFloatArrayElements(env, buffer, NULL);
    if (!values) return;
    const gradd_status_t status = gradd_train_copy_in(SESSION(session), trainable, values, n);
    (*env)->ReleaseFloatArrayElements(env, buffer, values, JNI_ABORT);
    check(env, status);
}

NATIVE(void, export)
(JNIEnv *env, jclass class, jlong session, jbyteArray path, jobjectArray outputs) {
    (void)class;
    const jsize n = (*env)->GetArrayLength(env, outputs);
    char *at = copy_of(env, path), **names = calloc((size_t)n + 1, sizeof *names);
    if (!names) no_memory(env);
    for (jsize i = 0; i < n && !(*env)->ExceptionCheck(env); i++) {
        jbyteArray name = (*env)->GetObjectArrayElement(env, outputs, i);
        names[i] = copy_of(env, name);
        (*env)->DeleteLocalRef(env, name);
    }
    if (!(*env)->ExceptionCheck(env))
        check(env, gradd_train_export(SESSION(session), at, (const char *const *)names, n));
    for (jsize i = 0; names && i < n; i++)
        free(names[i]);
    free(names);
    free(at);
}
