/* Lists of tensors from a message, turned into checked addresses. See worker.h.
 *
 * A segment is retained before it is resolved, so that `unsegment` in the I/O thread cannot unmap
 * it in between.
 */
#include <stdlib.h>

#include "server/worker.h"

static gradd_status_t reserve(tensors_t *tensors, gradd_handle_table_t *table, int n,
                              const char *what) {
    *tensors = (tensors_t){.table = table};
    if (n > WORK_MAX_TENSORS)
        return GRADD_FAIL(LIMIT, "%s: %d tensors, more than %d", what, n, WORK_MAX_TENSORS);
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

static gradd_status_t append(tensors_t *tensors, const msgpack_object *o) {
    gradd_tensor_t tensor;
    int i = tensors->n;
    if (o->type == MSGPACK_OBJECT_NIL) {
        tensors->n++;
        return GRADD_OK;
    }
    GRADD_TRY(wire_tensor(o, &tensor));
    GRADD_TRY(retain(tensors, tensor.segment));
    GRADD_TRY(gradd_handle_tensor(tensors->table, &tensor, &tensors->address[i]));
    tensors->types[i] = tensor.type;
    uintptr_t lo = (uintptr_t)tensors->address[i];
    tensors->spans[tensors->n_spans++] =
        (span_t){.lo = lo, .hi = lo + (uintptr_t)gradd_type_bytes(&tensor.type), .tag = i};
    tensors->n++;
    return GRADD_OK;
}

static gradd_status_t build(tensors_t *tensors, gradd_handle_table_t *table,
                            const msgpack_object *list, const char *what, bool pairs,
                            uint64_t *out_positions) {
    int n = wire_count(list);
    gradd_status_t st = reserve(tensors, table, n, what);
    for (int i = 0; i < n && st == GRADD_OK; i++) {
        const msgpack_object *entry = wire_at(list, i);
        if (pairs) {
            out_positions[i] = wire_u64(wire_at(entry, 0));
            entry = wire_at(entry, 1);
        }
        st = append(tensors, entry);
        if (st != GRADD_OK) gradd_wrap(st, "%s[%d]", what, i);
    }
    if (st != GRADD_OK) {
        tensors_finish(tensors);
        return st;
    }
    tensors->n_spans = spans_sort(tensors->spans, tensors->n_spans);
    return GRADD_OK;
}

gradd_status_t tensors_init(tensors_t *tensors, gradd_handle_table_t *table,
                            const msgpack_object *list, const char *what) {
    return build(tensors, table, list, what, false, NULL);
}

gradd_status_t tensors_init_pairs(tensors_t *tensors, gradd_handle_table_t *table,
                                  const msgpack_object *list, const char *what,
                                  uint64_t *out_positions) {
    return build(tensors, table, list, what, true, out_positions);
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
