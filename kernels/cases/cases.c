/* Parser of the test-case language. See cases.h. Recursive descent over one line of text; every
 * failure names the position, because the text is written by people. */
#include "kernels/cases/cases.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"

typedef struct parser_s {
    const char *text, *at;
    gradd_dtype_t float_as;
    uint64_t random;
    gradd_case_data_t *out;
} parser_t;

typedef struct case_block_s {
    struct case_block_s *next;
    char pad[64 - sizeof(void *)]; /* keeps the bytes that follow aligned to 64 */
} case_block_t;

#define BAD(p, what)                                                                               \
    GRADD_FAIL(GRAPH, "case \"%s\", column %d: %s", (p)->text, (int)((p)->at - (p)->text) + 1, what)

void *gradd_case_alloc(gradd_case_data_t *data, size_t bytes) {
    size_t whole = (sizeof(case_block_t) + bytes + 63) / 64 * 64;
    case_block_t *block = aligned_alloc(64, whole);
    if (!block) return NULL;
    memset(block, 0, whole);
    block->next = data->blocks;
    data->blocks = block;
    return block + 1;
}

void gradd_case_free(gradd_case_data_t *data) {
    for (case_block_t *block = data->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    data->blocks = NULL;
}

static void blanks(parser_t *p) {
    while (*p->at == ' ')
        p->at++;
}

static bool eat(parser_t *p, const char *token) {
    size_t n = strlen(token);
    if (strncmp(p->at, token, n)) return false;
    p->at += n;
    return true;
}

/* splitmix64: a counter hashed, the same on every machine */
static double uniform(parser_t *p) {
    uint64_t z = (p->random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static gradd_status_t number(parser_t *p, double *value, int64_t *integer, bool *is_float) {
    char *end;
    *value = strtod(p->at, &end);
    if (end == p->at) return BAD(p, "expected a number");
    *is_float = false;
    for (const char *c = p->at; c < end; c++)
        if (strchr(".eEnN", *c)) *is_float = true;
    *integer = *is_float ? 0 : strtoll(p->at, NULL, 10);
    p->at = end;
    return GRADD_OK;
}

static void store(gradd_view_t *view, int64_t i, double value, int64_t integer) {
    switch (view->type.dtype) {
    case GRADD_DT_F32:
        ((float *)view->data)[i] = (float)value;
        break;
    case GRADD_DT_F64:
        ((double *)view->data)[i] = value;
        break;
    case GRADD_DT_BF16:
        ((gradd_bf16_t *)view->data)[i] = gradd_f32_bf16((float)value);
        break;
    case GRADD_DT_F16:
        ((gradd_f16_t *)view->data)[i] = gradd_f32_f16((float)value);
        break;
    case GRADD_DT_I64:
        ((int64_t *)view->data)[i] = integer;
        break;
    case GRADD_DT_I32:
        ((int32_t *)view->data)[i] = (int32_t)integer;
        break;
    case GRADD_DT_BOOL:
        ((uint8_t *)view->data)[i] = integer != 0;
        break;
    case GRADD_DT_U8:
        ((uint8_t *)view->data)[i] = (uint8_t)integer;
        break;
    case GRADD_DT_I8:
        ((int8_t *)view->data)[i] = (int8_t)integer;
        break;
    case GRADD_DT_I16:
        ((int16_t *)view->data)[i] = (int16_t)integer;
        break;
    case GRADD_DT_U16:
        ((uint16_t *)view->data)[i] = (uint16_t)integer;
        break;
    default:
        break;
    }
}

static gradd_status_t literals(parser_t *p, gradd_view_t *view) {
    int64_t count = gradd_type_count(&view->type), n = 0, integer = 0;
    double value = 0;
    bool is_float;
    while (*p->at != '}') {
        GRADD_TRY(number(p, &value, &integer, &is_float));
        if (n >= count) return BAD(p, "more literals than elements");
        /* inf and nan are literals, too, and no integers */
        if (is_float) integer = fabs(value) < 0x1p62 ? (int64_t)value : 0;
        store(view, n++, value, integer);
        if (!eat(p, ",")) break;
    }
    if (!eat(p, "}")) return BAD(p, "expected '}'");
    for (; n == 1 && count > 1 && count > n;) {
        for (int64_t i = 1; i < count; i++)
            store(view, i, value, integer);
        n = count;
    }
    return n == count ? GRADD_OK : BAD(p, "fewer literals than elements");
}

static gradd_status_t random_fill(parser_t *p, gradd_view_t *view) {
    bool is_float = gradd_dtype_is_float(view->type.dtype), any;
    double lo = is_float ? -2 : 0, hi = is_float ? 2 : view->type.dtype == GRADD_DT_BOOL ? 1 : 4;
    if (eat(p, ":(")) {
        int64_t unused;
        GRADD_TRY(number(p, &lo, &unused, &any));
        if (!eat(p, ",")) return BAD(p, "expected ','");
        GRADD_TRY(number(p, &hi, &unused, &any));
        if (!eat(p, ")")) return BAD(p, "expected ')'");
    }
    for (int64_t i = 0, n = gradd_type_count(&view->type); i < n; i++) {
        double u = uniform(p);
        if (is_float)
            store(view, i, (double)(float)(lo + (hi - lo) * u), 0);
        else /* which may be wider than an int64_t */
            store(view, i, 0, (int64_t)((uint64_t)(int64_t)lo + (uint64_t)(u * (hi - lo + 1))));
    }
    return GRADD_OK;
}

static gradd_status_t dims(parser_t *p, gradd_type_t *type) {
    if (!eat(p, "[")) return BAD(p, "expected '['");
    while (*p->at != ']') {
        char *end;
        if (type->rank >= GRADD_MAX_RANK) return BAD(p, "rank too high");
        if (!isdigit((unsigned char)*p->at)) return BAD(p, "expected a dimension");
        type->dims[type->rank++] = strtoll(p->at, &end, 10);
        p->at = end;
        if (!eat(p, ",") && *p->at != ']') return BAD(p, "expected ',' or ']'");
    }
    p->at++;
    return gradd_type_check(type);
}

static gradd_status_t input(parser_t *p) {
    gradd_case_data_t *out = p->out;
    if (out->n_in >= GRADD_OP_MAX_IN) return BAD(p, "too many inputs");
    gradd_view_t *view = &out->in[out->n_in];
    bool *known = &out->known[out->n_in++];
    if (*p->at == '-' && p->at[1] != '>') {
        p->at++;
        return GRADD_OK;
    }
    size_t n = 0;
    while (isalnum((unsigned char)p->at[n]))
        n++;
    view->type.dtype = gradd_dtype_from_name(p->at, n);
    if (view->type.dtype == GRADD_DT_NONE) return BAD(p, "expected an element type or '-'");
    if (view->type.dtype == GRADD_DT_F32 && p->float_as) view->type.dtype = p->float_as;
    p->at += n;
    GRADD_TRY(dims(p, &view->type));
    view->data = gradd_case_alloc(out, (size_t)gradd_type_bytes(&view->type) + 64);
    if (!view->data) return GRADD_FAIL(NOMEM, "case \"%s\"", p->text);
    *known = eat(p, "={");
    return *known ? literals(p, view) : random_fill(p, view);
}

static char *copy_text(parser_t *p, const char *from, size_t n) {
    char *copy = gradd_case_alloc(p->out, n + 1);
    if (copy) memcpy(copy, from, n);
    return copy;
}

static gradd_status_t list(parser_t *p, gradd_attr_t *attr) {
    enum { MAX = 64 };
    int64_t *ints = gradd_case_alloc(p->out, MAX * sizeof *ints);
    double *floats = gradd_case_alloc(p->out, MAX * sizeof *floats);
    if (!ints || !floats) return GRADD_FAIL(NOMEM, "case \"%s\"", p->text);
    bool any_float = false;
    while (*p->at != ']') {
        bool is_float;
        if (attr->n >= MAX) return BAD(p, "list too long");
        GRADD_TRY(number(p, &floats[attr->n], &ints[attr->n], &is_float));
        any_float |= is_float;
        attr->n++;
        if (!eat(p, ",") && *p->at != ']') return BAD(p, "expected ',' or ']'");
    }
    p->at++;
    attr->kind = any_float ? GRADD_ATTR_FLOATS : GRADD_ATTR_INTS;
    attr->ints = any_float ? NULL : ints;
    attr->floats = any_float ? floats : NULL;
    return GRADD_OK;
}

static gradd_status_t attribute(parser_t *p) {
    gradd_case_data_t *out = p->out;
    if (out->n_attrs >= GRADD_CASE_MAX_ATTRS) return BAD(p, "too many attributes");
    gradd_attr_t *attr = &out->attrs[out->n_attrs++];
    size_t n = 0;
    while (isalnum((unsigned char)p->at[n]) || p->at[n] == '_')
        n++;
    if (!n || p->at[n] != '=') return BAD(p, "expected name=value");
    attr->name = copy_text(p, p->at, n);
    if (!attr->name) return GRADD_FAIL(NOMEM, "case \"%s\"", p->text);
    p->at += n + 1;
    if (eat(p, "[")) return list(p, attr);
    if (eat(p, "\"")) {
        const char *end = strchr(p->at, '"');
        if (!end) return BAD(p, "string does not end");
        attr->kind = GRADD_ATTR_STRING;
        attr->n = (size_t)(end - p->at);
        attr->s = copy_text(p, p->at, attr->n);
        p->at = end + 1;
        return attr->s ? GRADD_OK : GRADD_FAIL(NOMEM, "case \"%s\"", p->text);
    }
    bool is_float;
    double value;
    GRADD_TRY(number(p, &value, &attr->i, &is_float));
    attr->kind = is_float ? GRADD_ATTR_FLOAT : GRADD_ATTR_INT;
    if (is_float) attr->f = (double)(float)value; /* attributes of a model are f32 */
    return GRADD_OK;
}

static gradd_status_t parse(parser_t *p) {
    bool right = false;
    for (blanks(p); *p->at; blanks(p)) {
        if (eat(p, "|")) {
            if (right) return BAD(p, "second '|'");
            right = true;
        } else if (eat(p, "->")) {
            blanks(p);
            p->out->n_out = (int)strtol(p->at, (char **)&p->at, 10);
            blanks(p);
            if (*p->at || p->out->n_out < 1) return BAD(p, "expected -> n at the end");
        } else {
            GRADD_TRY(right ? attribute(p) : input(p));
            if (*p->at && *p->at != ' ') return BAD(p, "expected a blank");
        }
    }
    return GRADD_OK;
}

gradd_status_t gradd_case_parse(const char *text, gradd_dtype_t float_as, uint64_t seed,
                                gradd_case_data_t *out) {
    parser_t p = {.text = text, .at = text, .float_as = float_as, .random = seed, .out = out};
    memset(out, 0, sizeof *out);
    gradd_status_t status = parse(&p);
    if (status) gradd_case_free(out);
    return status;
}
