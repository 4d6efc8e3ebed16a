/* Lists of tensors from a message, turned into checked addresses. See worker.h.
 *
 * A segment is retained before it is resolved, so that `unsegment` in the I/O thread cannot unmap
 * it in between.
 */
#include <stdlib.h>

#include "server/verbs/worker.h"

static gradd_status_t reserve(tensors_t *tensors, gradd_handle_table_t *table, int n,
                              const char *what) {
    *tensors = (tensors_t){.table = table};
    if (n > SESSION_MAX_TENSORS)
        return GRADD_FAIL(LIMIT, "%s: %d tensors, more than %d", what, n, SESSION_MAX_TENSORS);
    if (n == 0) return GRADD_OK;
    tensors->types = calloc((size_t)n, sizeof *tensors->types);
    tensors->address = calloc((size_t)n, sizeof *tensors->address);
    tensors->segments = calloc((size_t)n, sizeof *tensors->segments);
    tensors->spans = calloc((size_t)n, sizeof *tensors->spans);
    if (tensors->types && tensors->address && tensors->segments && tensors->spans) return GRADD_OK;
    return GRADD_FAIL(NOMEM, "no memory for %d tensors", n);
}

/* Neighbours mostly lie in the same segment: one use counts for a row of them. */
static gradd_status_t retain(tensors_t *tensors, uint64_t segment) {
    if (tensors->n_segments > 0 && tensors->segments[tensors->n_segments - 1] == segment)
        return GRADD_OK;
    GRADD_TRY(gradd_handle_retain(tensors->table, segment));
    tensors->segments[tensors->n_segments++] = segment;
    return GRADD_OK;
}

static gradd_status_t put(tensors_t *tensors, int i, const gradd_tensor_t *tensor) {
    GRADD_TRY(retain(tensors, tensor->segment));
    GRADD_TRY(gradd_handle_tensor(tensors->table, tensor, &tensors->address[i]));
    tensors->types[i] = tensor->type;
    uintptr_t lo = (uintptr_t)tensors->address[i];
    tensors->spans[tensors->n_spans++] =
        (span_t){.lo = lo, .hi = lo + (uintptr_t)gradd_type_bytes(&tensor->type), .tag = i};
    return GRADD_OK;
}

/* Where entry i belongs: positions rise, so none comes twice. */
static gradd_status_t place(const wire_tensors_t *list, int i, int n, int *out_position) {
    uint64_t at = list->at ? wire_u64(wire_at(list->at, i)) : (uint64_t)i;
    if (list->at && i && at <= wire_u64(wire_at(list->at, i - 1)))
        return GRADD_FAIL(TENSOR, "position %llu after %llu, expected a rising order",
                          (unsigned long long)at,
                          (unsigned long long)wire_u64(wire_at(list->at, i - 1)));
    if (at >= (uint64_t)n)
        return GRADD_FAIL(TENSOR, "position %llu, expected below %d", (unsigned long long)at, n);
    *out_position = (int)at;
    return GRADD_OK;
}

gradd_status_t tensors_init_placed(tensors_t *tensors, gradd_handle_table_t *table,
                                   const msgpack_object *object, int n, const char *what) {
    const wire_tensors_t list = wire_tensors(object);
    gradd_status_t st = reserve(tensors, table, list.n > n ? list.n : n, what);
    for (int i = 0; i < list.n && st == GRADD_OK; i++) {
        gradd_tensor_t tensor;
        int position = 0;
        st = place(&list, i, n, &position);
        if (st == GRADD_OK) st = wire_tensor_at(&list, i, &tensor);
        if (st == GRADD_OK) st = put(tensors, position, &tensor);
        if (st != GRADD_OK) gradd_wrap(st, "%s[%d]", what, i);
    }
    if (st != GRADD_OK) {
        tensors_finish(tensors);
        return st;
    }
    tensors->n = n;
    tensors->n_spans = spans_sort(tensors->spans, tensors->n_spans);
    return GRADD_OK;
}

gradd_status_t tensors_init(tensors_t *tensors, gradd_handle_table_t *table,
                            const msgpack_object *object, const char *what) {
    return tensors_init_placed(tensors, table, object, wire_rows(object), what);
}

gradd_status_t tensors_init_one(tensors_t *tensors, gradd_handle_table_t *table,
                                const msgpack_object *object, const char *what) {
    gradd_tensor_t tensor;
    GRADD_TRY(wire_tensor(object, &tensor));
    gradd_status_t st = reserve(tensors, table, 1, what);
    if (st == GRADD_OK) st = put(tensors, 0, &tensor);
    if (st != GRADD_OK) {
        gradd_wrap(st, "%s", what);
        tensors_finish(tensors);
        return st;
    }
    tensors->n = 1;
    tensors->n_spans = spans_sort(tensors->spans, tensors->n_spans);
    return GRADD_OK;
}

void tensors_finish(tensors_t *tensors) {
    if (!tensors) return;
    for (int i = 0; i < tensors->n_segments; i++)
        gradd_handle_release(tensors->table, tensors->segments[i]);
    free(tensors->types);
    free(tensors->address);
    free(tensors->segments);
    free(tensors->spans);
    *tensors = (tensors_t){0};
}
