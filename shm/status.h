/* Status codes and the failure message of the calling thread.
 *
 * Every fallible function returns gradd_status_t (0 = ok) and nothing else. The place that detects
 * an error calls GRADD_FAIL with one sentence: what, which value, which limit. Callers may wrap it
 * with context ("node 17 'Softmax'"), and the caller that knows the node of the model puts its name
 * into the record beside the sentence, so that no code has to parse sentences. The record lives in
 * fixed per-thread memory, so reporting an error allocates nothing and leaks nothing. The request
 * boundary turns it into the reply, and Python turns the code into an exception class.
 *
 * The codes are one list: the bare name travels on the wire, GRADD_E_<name> is the C enumerator.
 * Causes and remedies are with the exception classes, adapters/python/gradd/errors.py.
 */
#ifndef GRADD_SHM_STATUS_H
#define GRADD_SHM_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(name on the wire) */
#define GRADD_STATUS_MAP(X)                                                                        \
    X(SESSION)     /* unknown, foreign or lost session */                                          \
    X(MODEL)       /* the bytes are not a usable ONNX model */                                     \
    X(GRAPH)       /* the graph is not valid */                                                    \
    X(INDEX)       /* an index is out of range at run time */                                      \
    X(SHM)         /* a shared memory region is not usable */                                      \
    X(TENSOR)      /* a tensor does not match what the plan expects */                             \
    X(STALE)       /* an object is gone or has changed since it was named */                       \
    X(VERSION)     /* protocol versions do not match */                                            \
    X(LIMIT)       /* a limit is exceeded */                                                       \
    X(NOMEM)       /* out of memory */                                                             \
    X(NOSPC)       /* no space to back shared memory */                                            \
    X(NONFINITE)   /* a value is NaN or infinite */                                                \
    X(DEVICE)      /* a device does not work any more */                                           \
    X(PEER)        /* another process that trains the same model does not take part */             \
    X(IO)          /* an input or output operation failed */                                       \
    X(EXTDATA)     /* external data is not accepted */                                             \
    X(UNSUPPORTED) /* not supported */                                                             \
    X(INTERNAL)    /* a defect in gradd */

typedef enum gradd_status_e {
    GRADD_OK = 0,
#define X(name) GRADD_E_##name,
    GRADD_STATUS_MAP(X)
#undef X
        GRADD_STATUS_COUNT
} gradd_status_t;

#define GRADD_ERROR_BYTES      1024
#define GRADD_ERROR_NODE_BYTES 256

typedef struct gradd_failure_s {
    gradd_status_t code;
    char text[GRADD_ERROR_BYTES];
    char node[GRADD_ERROR_NODE_BYTES]; /* name of the model's node; "" = none, or it has no name */
    char where[96];                    /* "file.c:12", for logs, not for users */
} gradd_failure_t;

/* Name on the wire ("TENSOR"; "OK" for 0), never NULL. */
const char *gradd_status_name(gradd_status_t status);

/* The last failure in this thread; zeroed if there was none. Valid until the next one. */
const gradd_failure_t *gradd_failure(void);
/* Makes a failure that was copied from there the last one again. */
void gradd_failure_restore(const gradd_failure_t *failure);
/* Its text and its location. */
const char *gradd_error_message(void);
const char *gradd_error_where(void);
/* Replaces this thread's message, which is about no node then. */
void gradd_error_set(const char *message);

gradd_status_t gradd_fail_at(const char *file, int line, gradd_status_t code, const char *format,
                             ...) __attribute__((format(printf, 4, 5), cold));
/* Puts "<context>: " before the current message and returns code unchanged. */
gradd_status_t gradd_wrap(gradd_status_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
/* Says which node of the model the current failure is about and returns code unchanged; the last
 * one said counts. NULL = it has no name. A name that does not fit is left out: cut, it could be
 * another node's. */
gradd_status_t gradd_at_node(gradd_status_t code, const char *name) __attribute__((cold));

#define GRADD_FAIL(code, ...) gradd_fail_at(__FILE__, __LINE__, GRADD_E_##code, __VA_ARGS__)
#define GRADD_TRY(expr)                                                                            \
    do {                                                                                           \
        gradd_status_t try_status_ = (expr);                                                       \
        if (try_status_ != GRADD_OK) return try_status_;                                           \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
