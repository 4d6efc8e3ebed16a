/* Per-thread failure record and the names of the status codes. See status.h. */
#include "shm/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const names[] = {[GRADD_OK] = "OK",
#define X(name) [GRADD_E_##name] = #name,
                                    GRADD_STATUS_MAP(X)
#undef X
};

static _Thread_local gradd_failure_t failure;

const char *gradd_status_name(gradd_status_t status) {
    return (unsigned)status < GRADD_STATUS_COUNT ? names[status] : "INTERNAL";
}

const gradd_failure_t *gradd_failure(void) {
    return &failure;
}

void gradd_failure_restore(const gradd_failure_t *kept) {
    failure = *kept;
}

const char *gradd_error_message(void) {
    return failure.text;
}

const char *gradd_error_where(void) {
    return failure.where;
}

void gradd_error_set(const char *message) {
    snprintf(failure.text, sizeof failure.text, "%s", message ? message : "");
    failure.node[0] = 0;
}

gradd_status_t gradd_fail_at(const char *file, int line, gradd_status_t code, const char *format,
                             ...) {
    char text[GRADD_ERROR_BYTES]; /* arguments may point into the old message */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(failure.text, text, sizeof text);
    failure.code = code;
    failure.node[0] = 0;
    snprintf(failure.where, sizeof failure.where, "%s:%d", file, line);
    return code;
}

gradd_status_t gradd_wrap(gradd_status_t code, const char *format, ...) {
    if (code == GRADD_OK) return code;
    char text[GRADD_ERROR_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n > 0 && (size_t)n + 2 < sizeof text)
        snprintf(text + n, sizeof text - (size_t)n, ": %.*s", (int)(sizeof text - (size_t)n - 3),
                 failure.text);
    memcpy(failure.text, text, sizeof text);
    failure.code = code;
    return code;
}

gradd_status_t gradd_at_node(gradd_status_t code, const char *name) {
    if (code == GRADD_OK) return code;
    size_t n = name ? strlen(name) : 0;
    if (n >= sizeof failure.node) n = 0;
    if (n) memmove(failure.node, name, n); /* the name may be the record's own */
    failure.node[n] = 0;
    return code;
}
