/* Which parameters a session trains, and copies of all of them side by side. See gradd_train.h. */
#include <string.h>

#include "server/graph/model.h"
#include "train/session.h"

/* ---- lists ----------------------------------------------------------------------------------- */

static train_parameter_t *parameter_at(const gradd_train_session_t *s, int k) {
    return &s->state->parameters[s->parameters[k]];
}

static gradd_status_t check_trained(const gradd_train_session_t *s, int index) {
    const train_parameter_t *p = &s->state->parameters[index];
    if (p->type.dtype != GRADD_DT_F32)
        return GRADD_FAIL(UNSUPPORTED, "parameter '%s' is %s: only f32 can be trained", p->name,
                          gradd_dtype_name(p->type.dtype));
    if (side_writes(&s->sides[GRADD_TRAIN_TRAINING], index))
        return GRADD_FAIL(TENSOR, "parameter '%s' holds running statistics, which are not trained",
                          p->name);
    return GRADD_OK;
}

gradd_status_t session_list_trained(gradd_train_session_t *s) {
    s->n_trained = 0;
    for (int k = 0; k < s->n_parameters; k++) {
        if (!parameter_at(s, k)->trainable) continue;
        GRADD_TRY(check_trained(s, s->parameters[k]));
        s->trained[s->n_trained++] = s->parameters[k];
    }
    if (!s->n_trained) return GRADD_FAIL(TENSOR, "the model has no parameter that is trained");
    return GRADD_OK;
}

int gradd_train_parameter_count(const gradd_train_session_t *s, bool trainable_only) {
    return trainable_only ? s->n_trained : s->n_parameters;
}

int gradd_train_parameter_index(const gradd_train_session_t *s, bool trainable_only, int i) {
    if (i < 0 || i >= gradd_train_parameter_count(s, trainable_only)) return -1;
    return trainable_only ? s->trained[i] : s->parameters[i];
}

/* ---- freezing and thawing -------------------------------------------------------------------- */

/* "*" stands for any characters. The last star takes more whenever what follows does not fit. */
static bool matches(const char *pattern, const char *name) {
    const char *star = NULL, *from = NULL;
    while (*name) {
        if (*pattern == '*') {
            star = ++pattern;
            from = name;
        } else if (*pattern == *name) {
            pattern++;
            name++;
        } else if (star) {
            pattern = star;
            name = ++from;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return !*pattern;
}

/* Nothing has changed yet: whether all of it may. */
static gradd_status_t check_change(const gradd_train_session_t *s, const char *pattern,
                                   bool trainable) {
    int found = 0, left = 0;
    for (int k = 0; k < s->n_parameters; k++) {
        const train_parameter_t *p = parameter_at(s, k);
        const bool is_meant = matches(pattern, p->name);
        if (is_meant && trainable) GRADD_TRY(check_trained(s, s->parameters[k]));
        found += is_meant;
        left += is_meant ? trainable : p->trainable;
    }
    if (!found) return GRADD_FAIL(TENSOR, "no parameter of the model matches '%s'", pattern);
    if (!left) return GRADD_FAIL(TENSOR, "'%s' would leave no parameter to train", pattern);
    return GRADD_OK;
}

static gradd_status_t change(gradd_train_session_t *s, const char *pattern, bool trainable,
                             int *out_changed) {
    int changed = 0;
    GRADD_TRY(check_change(s, pattern, trainable));
    for (int k = 0; k < s->n_parameters; k++) {
        train_parameter_t *p = parameter_at(s, k);
        if (p->trainable == trainable || !matches(pattern, p->name)) continue;
        p->trainable = trainable;
        changed++;
        if (trainable) continue;
        state_drop_gradient(p);
        state_drop_moments(p);
    }
    if (changed) shapes_drop(&s->sides[GRADD_TRAIN_TRAINING]);
    if (out_changed) *out_changed = changed;
    return session_list_trained(s);
}

gradd_status_t gradd_train_freeze(gradd_train_session_t *s, const char *pattern, int *out_changed) {
    return change(s, pattern, false, out_changed);
}

gradd_status_t gradd_train_thaw(gradd_train_session_t *s, const char *pattern, int *out_changed) {
    return change(s, pattern, true, out_changed);
}

/* ---- contiguous copies ----------------------------------------------------------------------- */

static train_parameter_t *copied_at(const gradd_train_session_t *s, bool trainable_only, int i) {
    return &s->state->parameters[gradd_train_parameter_index(s, trainable_only, i)];
}

gradd_status_t gradd_train_contiguous_count(const gradd_train_session_t *s, bool trainable_only,
                                            int64_t *out_count) {
    int64_t count = 0;
    for (int i = 0; i < gradd_train_parameter_count(s, trainable_only); i++) {
        const train_parameter_t *p = copied_at(s, trainable_only, i);
        if (p->type.dtype != GRADD_DT_F32)
            return GRADD_FAIL(TENSOR, "parameter '%s' is %s: a contiguous copy holds f32 alone",
                              p->name, gradd_dtype_name(p->type.dtype));
        count += gradd_type_count(&p->type);
    }
    *out_count = count;
    return GRADD_OK;
}

static gradd_status_t check_count(const gradd_train_session_t *s, bool trainable_only,
                                  int64_t count) {
    int64_t expected;
    GRADD_TRY(gradd_train_contiguous_count(s, trainable_only, &expected));
    if (count == expected) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "the parameters have %lld elements, the buffer %lld",
                      (long long)expected, (long long)count);
}

gradd_status_t gradd_train_copy_out(const gradd_train_session_t *s, bool trainable_only,
                                    float *buffer, int64_t count) {
    const int n = gradd_train_parameter_count(s, trainable_only);
    GRADD_TRY(check_count(s, trainable_only, count));
    for (int i = 0; i < n; i++)
        if (!copied_at(s, trainable_only, i)->data)
            return GRADD_FAIL(TENSOR, "parameter '%s' has no values yet",
                              copied_at(s, trainable_only, i)->name);
    for (int i = 0; i < n; i++) {
        const train_parameter_t *p = copied_at(s, trainable_only, i);
        memcpy(buffer, p->data, (size_t)p->bytes);
        buffer += gradd_type_count(&p->type);
    }
    return GRADD_OK;
}

gradd_status_t gradd_train_copy_in(gradd_train_session_t *s, bool trainable_only,
                                   const float *buffer, int64_t count) {
    const int n = gradd_train_parameter_count(s, trainable_only);
    GRADD_TRY(check_count(s, trainable_only, count));
    for (int i = 0; i < n; i++)
        GRADD_TRY(state_make_data(copied_at(s, trainable_only, i)));
    for (int i = 0; i < n; i++) {
        train_parameter_t *p = copied_at(s, trainable_only, i);
        p->changed = true;
        memcpy(p->data, buffer, (size_t)p->bytes);
        buffer += gradd_type_count(&p->type);
    }
    return GRADD_OK;
}
