/* Models and compiled plans that sessions share. See worker.h.
 *
 * Unused entries are kept for the next client as long as they are small (a model holds its
 * constants, a plan the folded ones; arenas belong to runs).
 */
#include <stdlib.h>
#include <string.h>

#include "server/host/log.h"
#include "server/verbs/crash.h"
#include "server/verbs/worker.h"

#define IDLE_MODELS     16
#define IDLE_PLANS      64
#define IDLE_PLAN_BYTES (8 << 20)
#define IDLE_MODEL_BYTES                                                                           \
    (32 << 20) /* beyond it, neither the model is kept nor plans made of it                        \
                */

model_entry_t *cache_find_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES]) {
    for (model_entry_t *m = worker->models; m; m = m->next) {
        if (memcmp(m->id, id, GRADD_SHA256_BYTES) != 0) continue;
        m->refs++;
        m->used = ++worker->clock;
        return m;
    }
    return NULL;
}

gradd_status_t cache_add_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES],
                               gradd_model_t *model, model_entry_t **out_model) {
    model_entry_t *entry = calloc(1, sizeof *entry);
    if (!entry) {
        gradd_model_destroy(model);
        return GRADD_FAIL(NOMEM, "no memory for a model");
    }
    entry->model = model;
    memcpy(entry->id, id, GRADD_SHA256_BYTES);
    entry->refs = 1;
    entry->used = ++worker->clock;
    entry->next = worker->models;
    worker->models = entry;
    *out_model = entry;
    return GRADD_OK;
}

gradd_status_t cache_load_model(worker_t *worker, const uint8_t id[GRADD_SHA256_BYTES],
                                const void *onnx, size_t bytes, model_entry_t **out_model) {
    gradd_model_t *model;
    GRADD_TRY(worker_admit_model(worker, 2 * (int64_t)bytes)); /* unpacked, and the constants */
    GRADD_TRY(gradd_model_load(onnx, bytes, &model));
    return cache_add_model(worker, id, model, out_model);
}

static bool is_large(const model_entry_t *entry) {
    return gradd_model_bytes(entry->model) > IDLE_MODEL_BYTES;
}

static void destroy_model(worker_t *worker, model_entry_t *dead) {
    model_entry_t **link = &worker->models;
    while (*link != dead)
        link = &(*link)->next;
    *link = dead->next;
    gradd_model_destroy(dead->model);
    free(dead);
}

/* Destroys the idle models that were used least recently until `keep` are left. */
static void trim_models(worker_t *worker, int keep) {
    for (;;) {
        model_entry_t *oldest = NULL;
        int n = 0;
        for (model_entry_t *m = worker->models; m; m = m->next) {
            if (m->refs > 0) continue;
            n++;
            if (!oldest || m->used < oldest->used) oldest = m;
        }
        if (n <= keep) return;
        destroy_model(worker, oldest);
    }
}

void cache_release_model(worker_t *worker, model_entry_t *model) {
    if (!model) return;
    model->refs--;
    if (!model->refs && is_large(model)) destroy_model(worker, model);
    trim_models(worker, IDLE_MODELS);
}

static void destroy_compiled(worker_t *worker, compiled_t **link) {
    compiled_t *dead = *link;
    *link = dead->next;
    gradd_plan_destroy(dead->plan); /* before its model */
    cache_release_model(worker, dead->model);
    free(dead);
}

static void trim_plans(worker_t *worker, int keep) {
    for (;;) {
        compiled_t **oldest = NULL;
        int n = 0;
        for (compiled_t **link = &worker->compiled; *link; link = &(*link)->next) {
            if ((*link)->refs > 0) continue;
            n++;
            if (!oldest || (*link)->used < (*oldest)->used) oldest = link;
        }
        if (n <= keep) return;
        destroy_compiled(worker, oldest);
    }
}

static void hash_u64(gradd_sha256_t *hash, uint64_t value) {
    gradd_sha256_update(hash, &value, sizeof value);
}

static void hash_list(gradd_sha256_t *hash, const int32_t *list, int n) {
    hash_u64(hash, (uint64_t)n);
    if (n) gradd_sha256_update(hash, list, (size_t)n * sizeof *list);
}

void cache_plan_key(const model_entry_t *model, const gradd_plan_options_t *o,
                    uint8_t out_key[GRADD_SHA256_BYTES]) {
    const char *device = o->device ? gradd_device_info(o->device)->name : "";
    gradd_sha256_t hash;
    gradd_sha256_init(&hash);
    gradd_sha256_update(&hash, model->id, sizeof model->id);
    gradd_sha256_update(&hash, device, strlen(device) + 1);
    hash_u64(&hash, (uint64_t)o->flags);
    hash_u64(&hash, (uint64_t)o->n_inputs);
    for (int i = 0; i < o->n_inputs; i++) {
        hash_u64(&hash, (uint64_t)o->inputs[i].dtype);
        hash_u64(&hash, (uint64_t)o->inputs[i].rank);
        for (int d = 0; d < o->inputs[i].rank; d++)
            hash_u64(&hash, (uint64_t)o->inputs[i].dims[d]);
    }
    hash_list(&hash, o->grads, o->n_grads);
    hash_list(&hash, o->outputs, o->n_outputs);
    hash_list(&hash, o->grad_outputs, o->n_grad_outputs);
    hash_list(&hash, o->parameters, o->n_parameters);
    hash_u64(&hash, (uint64_t)o->label_rows);
    hash_u64(&hash, (uint64_t)o->real_rows);
    hash_u64(&hash, (uint64_t)o->source_rows);
    hash_u64(&hash, (uint64_t)o->memory_budget);
    hash_u64(&hash, o->memory_budget ? 0 : (uint64_t)o->recompute); /* a budget decides alone */
    gradd_sha256_final(&hash, out_key);
}

gradd_status_t cache_find_compiled(worker_t *worker, const uint8_t key[GRADD_SHA256_BYTES],
                                   const gradd_device_t *device, compiled_t **out_compiled) {
    *out_compiled = NULL;
    GRADD_TRY(lost_check(&worker->lost, key));
    for (compiled_t *c = worker->compiled; c; c = c->next) {
        if (memcmp(c->key, key, sizeof c->key) != 0) continue;
        if (gradd_plan_device(c->plan) != device) continue;
        c->refs++;
        c->used = ++worker->clock;
        atomic_fetch_add(&worker->n_plan_hits, 1);
        *out_compiled = c;
        break;
    }
    return GRADD_OK;
}

gradd_status_t cache_add_compiled(worker_t *worker, const uint8_t key[GRADD_SHA256_BYTES],
                                  model_entry_t *model, gradd_plan_t *plan,
                                  compiled_t **out_compiled) {
    compiled_t *entry = calloc(1, sizeof *entry);
    gradd_status_t st = worker_admit_plan(worker, gradd_plan_info(plan)->constant_bytes);
    if (st == GRADD_OK && !entry) st = GRADD_FAIL(NOMEM, "no memory for a plan");
    if (st != GRADD_OK) {
        gradd_plan_destroy(plan);
        free(entry);
        return st;
    }
    memcpy(entry->key, key, sizeof entry->key);
    entry->plan = plan;
    entry->model = model;
    model->refs++;
    entry->refs = 1;
    entry->used = ++worker->clock;
    entry->next = worker->compiled;
    worker->compiled = entry;
    atomic_fetch_add(&worker->n_compiled, 1);
    *out_compiled = entry;
    return GRADD_OK;
}

gradd_status_t cache_compile(worker_t *worker, model_entry_t *model,
                             const gradd_plan_options_t *options, compiled_t **out_compiled,
                             bool *out_hit) {
    uint8_t key[GRADD_SHA256_BYTES];
    gradd_plan_t *plan;
    cache_plan_key(model, options, key);
    GRADD_TRY(cache_find_compiled(worker, key, options->device, out_compiled));
    *out_hit = *out_compiled;
    if (*out_hit) return GRADD_OK;
    crash_blame(key, false);
    gradd_status_t st = gradd_plan_create(model->model, options, &plan);
    crash_blame(NULL, false);
    GRADD_TRY(st);
    return cache_add_compiled(worker, key, model, plan, out_compiled);
}

void cache_release_compiled(worker_t *worker, compiled_t *compiled) {
    if (!compiled || --compiled->refs > 0) return;
    const gradd_plan_info_t *info = gradd_plan_info(compiled->plan);
    if (info->constant_bytes > IDLE_PLAN_BYTES || is_large(compiled->model)) {
        compiled_t **link = &worker->compiled;
        while (*link != compiled)
            link = &(*link)->next;
        destroy_compiled(worker, link);
    }
    trim_plans(worker, IDLE_PLANS);
}

void cache_finish(worker_t *worker) {
    trim_plans(worker, 0);
    trim_models(worker, 0);
}
