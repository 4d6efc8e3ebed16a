/* Chooses a kernel for each node of a sequence, the device's first that takes it, and has it
 * prepared. See plan.h.
 *
 * A state (a primitive with its generated code) costs time and memory, and the layers of a model
 * call for the same ones. So the plan keeps prepared states in a table, by everything that a kernel
 * sees when it prepares: attributes, types, and operands that are known. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/describe/cost.h"
#include "server/graph/compile_time.h"
#include "server/plan/plan.h"
#include "shm/hash.h"

/* Units of the budget that preparing a state takes: about a microsecond each. */
#define PREPARE_UNITS 200

struct ready_s {
    ready_t *next;
    const gradd_kernel_t *kernel;
    gradd_infer_t use; /* in and out point behind this struct; attributes are the graph's */
    gradd_prepared_t prepared;
};

static gradd_infer_t describe(const gradd_plan_t *p, const graph_node_t *n, graph_operands_t *o) {
    gradd_infer_t c = graph_describe(p->graph, n, o);
    c.threads = p->info.threads;
    return c;
}

static uint64_t hash_type(uint64_t hash, const gradd_type_t *type) {
    hash = gradd_hash_word(hash, (uint64_t)type->dtype);
    for (int d = 0; d < type->rank; d++)
        hash = gradd_hash_word(hash, (uint64_t)type->dims[d]);
    return hash;
}

static ready_t **bucket_of(gradd_plan_t *p, const gradd_infer_t *c) {
    uint64_t hash = GRADD_HASH_START;
    for (int i = 0; i < c->n_in; i++)
        hash = hash_type(hash, &c->in[i].type);
    for (int j = 0; j < c->n_out; j++)
        hash = hash_type(hash, &c->out[j]);
    return &p->ready[(hash ^ hash >> 32) % PLAN_READY_BUCKETS];
}

static bool same_use(const gradd_infer_t *a, const gradd_infer_t *b) {
    if (a->op != b->op || a->opset != b->opset || a->n_in != b->n_in || a->n_out != b->n_out)
        return false;
    for (int i = 0; i < a->n_in; i++)
        if (a->in[i].data != b->in[i].data || !gradd_type_equal(&a->in[i].type, &b->in[i].type))
            return false;
    for (int j = 0; j < a->n_out; j++)
        if (!gradd_type_equal(&a->out[j], &b->out[j])) return false;
    return graph_same_attrs(a->attrs, b->attrs);
}

/* An entry that no table holds yet, nothing prepared. */
static ready_t *new_entry(const gradd_kernel_t *kernel, const gradd_infer_t *c) {
    const size_t in_bytes = sizeof c->in[0] * (size_t)c->n_in;
    const size_t out_bytes = sizeof c->out[0] * (size_t)c->n_out;
    ready_t *r = calloc(1, sizeof *r + in_bytes + out_bytes);
    if (!r) return NULL;
    gradd_view_t *in = memcpy(r + 1, c->in, in_bytes);
    r->kernel = kernel;
    r->use = *c;
    r->use.in = in;
    r->use.out = memcpy((char *)in + in_bytes, c->out, out_bytes);
    return r;
}

static gradd_status_t prepare_shared(gradd_plan_t *p, const gradd_infer_t *c, choice_t *out) {
    ready_t **bucket = bucket_of(p, c);
    for (const ready_t *r = *bucket; r; r = r->next)
        if (r->kernel == out->kernel && same_use(&r->use, c)) {
            out->prepared = r->prepared;
            return GRADD_OK;
        }
    GRADD_TRY(compile_time_spend(PREPARE_UNITS));
    if (p->ready_bytes > (int64_t)GRAPH_MAX_BYTES)
        return GRADD_FAIL(LIMIT, "the plan's kernels hold %lld bytes, more than %zu",
                          (long long)p->ready_bytes, GRAPH_MAX_BYTES);
    ready_t *r = new_entry(out->kernel, c);
    if (!r) return GRADD_FAIL(NOMEM, "no memory to plan the graph");
    gradd_status_t status = gradd_kernel_prepare(out->kernel, c, &r->prepared);
    if (status) {
        free(r);
        return status;
    }
    r->next = *bucket;
    *bucket = r;
    p->ready_bytes += (int64_t)(sizeof *r + r->prepared.bytes);
    out->prepared = r->prepared;
    return GRADD_OK;
}

/* Chooses the kernel of a node and adds what its launch costs to *total. */
static gradd_status_t choose(const gradd_plan_t *p, const graph_node_t *n, choice_t *out,
                             plan_cost_t *total) {
    graph_operands_t operands;
    gradd_cost_t cost;
    const gradd_infer_t c = describe(p, n, &operands);
    out->kernel = gradd_backend_kernel(p->device->backend, &c);
    if (!out->kernel) return gradd_no_kernel(p->device->backend, &c);
    gradd_kernel_cost(out->kernel, &c, &cost);
    total->flops += cost.flops;
    total->bytes += (double)cost.read + (double)cost.written;
    total->launches++;
    return GRADD_OK;
}

/* Products of bf16 pairs go at twice the rate of those of f32, where the processor has them. */
static bool is_fast_product(const gradd_plan_t *p, const graph_node_t *n) {
    return p->device->info.native_bf16 && n->op->flags & GRADD_OP_COSTLY && n->n_in &&
           n->in[0] != GRADD_NONE && graph_type(p->graph, n->in[0])->dtype == GRADD_DT_BF16;
}

/* As if bytes took so many times as long as in the model. */
static double node_us(const gradd_plan_t *p, const graph_node_t *n, const choice_t *choice,
                      double slower, bool fast) {
    graph_operands_t operands;
    gradd_cost_t cost;
    if (!choice->kernel) return 0;
    const gradd_infer_t c = describe(p, n, &operands);
    gradd_kernel_cost(choice->kernel, &c, &cost);
    const plan_cost_t total = {.flops = fast ? cost.flops / 2 : cost.flops,
                               .bytes = slower * ((double)cost.read + (double)cost.written),
                               .again = cost.again,
                               .launches = 1};
    return plan_cost_us(&total, p->info.threads);
}

double plan_node_us(const gradd_plan_t *p, const graph_node_t *n, const choice_t *choice) {
    return node_us(p, n, choice, 1, is_fast_product(p, n));
}

/* Where a launch does little but move, a thread gets 5 to 6 GB/s of memory on a virtual machine, a
 * quarter of what the model has it move, which is no matter to its other uses. The parts of
 * products are a matter of bits, and of arithmetic. */
#define SLOW_MEMORY 4

#define MOST_PARTS 10000

/* What takes so long by the model is made in so many parts; 0: as a whole. */
static int parts_of_us(const gradd_plan_t *p, double us) {
    const double parts = us / PLAN_PART_US;
    if (!p->device->backend->host || parts <= 1) return 0;
    return parts < MOST_PARTS ? (int)ceil(parts) : MOST_PARTS;
}

int plan_copy_parts(const gradd_plan_t *p, int64_t bytes) {
    const plan_cost_t moved = {.bytes = 2.0 * SLOW_MEMORY * (double)bytes, .launches = 1};
    return parts_of_us(p, plan_cost_us(&moved, p->info.threads));
}

static int parts_of(const gradd_plan_t *p, const graph_node_t *n, const choice_t *choice) {
    const double slower = n->op->flags & GRADD_OP_COSTLY ? 1 : SLOW_MEMORY;
    /* Attention has a softmax between its products, in f32 whatever they are in. */
    const bool fast = is_fast_product(p, n) && !choice->kernel->parts;
    return parts_of_us(p, node_us(p, n, choice, slower, fast));
}

static gradd_status_t prepare(gradd_plan_t *p, const graph_node_t *n, choice_t *out) {
    graph_operands_t operands;
    gradd_infer_t c = describe(p, n, &operands);
    c.parts = parts_of(p, n, out);
    if (out->kernel->prepare || c.parts > 1) return prepare_shared(p, &c, out);
    return gradd_kernel_prepare(out->kernel, &c, &out->prepared);
}

gradd_status_t plan_choose_node(gradd_plan_t *p, const graph_node_t *n, choice_t *out) {
    plan_cost_t cost = {0};
    *out = (choice_t){0};
    GRADD_TRY(choose(p, n, out, &cost));
    return prepare(p, n, out);
}

gradd_status_t plan_choose(gradd_plan_t *p, sequence_t *sequence) {
    char text[GRAPH_NODE_TEXT];
    const graph_t *g = p->graph;
    const graph_node_t *n = NULL;
    plan_cost_t total = {0};
    gradd_status_t status = GRADD_OK;
    sequence->choices = calloc((size_t)sequence->n + 1, sizeof sequence->choices[0]);
    if (!sequence->choices) return GRADD_FAIL(NOMEM, "no memory to plan the graph");
    for (int k = 0; k < sequence->n && !status; k++) {
        n = &g->nodes[sequence->nodes[k]];
        if (n->op->flags & GRADD_OP_VIEW || plan_writes_nothing(g, n)) continue;
        status = choose(p, n, &sequence->choices[k], &total);
    }
    if (!p->info.threads) p->info.threads = plan_threads(&total, p->device->info.threads);
    gradd_cpu_enter(p->info.threads);
    for (int k = 0; k < sequence->n && !status; k++) {
        n = &g->nodes[sequence->nodes[k]];
        if (sequence->choices[k].kernel) status = prepare(p, n, &sequence->choices[k]);
    }
    if (!status) return GRADD_OK;
    const model_node_t *origin = graph_origin(g, n);
    return gradd_wrap(gradd_at_node(status, origin->name), "%s",
                      graph_node_text(g, origin, text, sizeof text));
}

void plan_unprepare(gradd_plan_t *p) {
    for (int i = 0; i < PLAN_READY_BUCKETS; i++)
        for (ready_t *r = p->ready[i], *next; r; r = next) {
            next = r->next;
            gradd_kernel_unprepare(r->kernel, &r->prepared);
            free(r);
        }
}
