/* The graph under compilation: one model for one tuple of concrete input shapes.
 *
 * Values have concrete types; those whose elements are known at compile time carry `data`. Nodes
 * point to operator rows. Building a node infers its types, folds it if all it reads is known, and
 * returns an equal existing node instead of a second one (common subexpressions). Forward nodes
 * come from the model, backward nodes from gradient rules; both live in one list in execution
 * order, because a rule only refers to what exists already.
 *
 * graph_t implements gradd_builder_t, so that rules in kernels/ can emit nodes. All memory belongs
 * to the graph's arena. One thread at a time.
 */
#ifndef GRADD_SERVER_GRAPH_GRAPH_H
#define GRADD_SERVER_GRAPH_GRAPH_H

#include "kernels/contract/backend.h"
#include "server/api/gradd.h"
#include "server/graph/arena.h"
#include "server/graph/model.h"
#include "server/graph/phases.h"

typedef enum value_kind_e {
    VALUE_INPUT,       /* index = model input; behind these, a list of live rows */
    VALUE_GRAD_OUTPUT, /* index = position in the plan's outputs: gradient that arrives */
    VALUE_CONST,       /* data is set */
    VALUE_NODE,        /* index = output of `node` */
} value_kind_t;

typedef struct graph_value_s {
    gradd_type_t type;
    const void *data; /* Owned by the arena; known at compile time, else NULL */
    value_kind_t kind;
    int32_t node;     /* producer of a VALUE_NODE, else -1 */
    int32_t index;    /* see value_kind_t */
    gradd_val_t root; /* the value whose bytes it shares: itself unless a view operator made it */
} graph_value_t;

typedef struct graph_node_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int opset;
    int n_in, n_out;
    gradd_val_t *in, *out; /* GRADD_NONE = absent */
    uint64_t random;       /* Philox coordinate: index of the model's node */
    int32_t origin;       /* model node it comes from (for a gradient: the one it differentiates) */
    const int32_t *parts; /* Owned by the arena: the model nodes a recognised operator stands for */
    int n_parts;
    uint8_t rows; /* live_set_t of the rows that it runs over; 0 = all, or it has none */
    bool backward;
    bool dead;     /* left out of every schedule */
    bool no_merge; /* no other node is taken for it, nor it for another */
} graph_node_t;

typedef struct graph_s {
    gradd_builder_t builder; /* first member: rules get a pointer to it */
    arena_t *arena;          /* Owned */
    const model_t *model;    /* Borrowed */
    graph_value_t **values;  /* Owned array of arena entries: their addresses are stable */
    int n_values, cap_values;
    graph_node_t *nodes; /* Owned, grows */
    int n_nodes, cap_nodes;
    int n_forward;         /* nodes [0, n_forward) come from the model */
    int n_clones;          /* nodes [n_forward, n_forward + n_clones) compute these again, or 0 */
    gradd_val_t *of_model; /* per model value: what it became, GRADD_NONE = nothing */
    struct tensor_list_s *sequences; /* Owned by the arena: lists of values (sequence.c) */
    int n_sequences, cap_sequences;
    gradd_val_t *inputs;  /* per model input */
    gradd_val_t *outputs; /* per wanted output */
    int n_outputs;
    gradd_val_t *grads; /* Borrowed: gradients of the backward that joint passes look at */
    int n_grads;
    const gradd_val_t *formed; /* Borrowed from the plan: per gradient, what the forward forms of it
                                  in memory of the caller, or GRADD_NONE */
    int n_formed;
    const bool *parameters; /* Owned by the arena: per model input */
    const bool *trained;    /* the same: its gradient is wanted */
    /* sizes of the lists of live rows that are wanted; 0 = none */
    int64_t label_rows, real_rows, source_rows;
    gradd_val_t lists[3]; /* inputs behind those of the model: these lists, in this order */
    int n_lists;
    gradd_live_t live; /* what a graph over all rows could leave out */
    int64_t all_rows;  /* of a batch, where some are left out; else 0 */
    int32_t *buckets;  /* Owned: hash of nodes, for common subexpressions; -1 ends a chain */
    int32_t *chain;    /* Owned: next node with the same hash */
    int n_buckets;
    int32_t origin; /* these three are given to nodes emitted now */
    uint64_t random;
    uint8_t rows;
    bool in_backward;
    bool plain;
    bool written_out; /* no pass runs, and no operator that has an expansion is left whole */
    bool trains;      /* a backward may follow */
    bool dense_loss;  /* logits are made as a whole */
    bool early;       /* memory of gradients that a forward forms is the caller's */
    int64_t fold_bytes, fold_cost;  /* held by folded constants; read and written to make them */
    const gradd_backend_t *backend; /* the device that will run it: casts are put for its kernels */
} graph_t;

/* Bound on what compiling one model may hold: constants, nodes, attributes. */
#define GRAPH_MAX_BYTES ((size_t)1 << 30)

typedef struct graph_options_s {
    const gradd_type_t *inputs; /* per model input */
    const int32_t *outputs;     /* model outputs wanted */
    int n_outputs;
    bool plain; /* leave out the passes that recognise patterns, expand what the rows expand */
    bool written_out; /* with plain: expand what gradient rules emit as well */
    const gradd_backend_t *backend;
    const int32_t *parameters; /* model inputs that are parameters */
    int n_parameters;
    const int32_t *trained; /* model inputs whose gradient is wanted; none: no backward follows */
    int n_trained;
    bool dense_loss, early;                     /* see graph_t */
    int64_t label_rows, real_rows, source_rows; /* see gradd_plan_options_t */
} graph_options_t;

/* Everything a new node needs; arrays are copied. */
typedef struct graph_emit_s {
    const gradd_op_t *op;
    int opset;
    gradd_attrs_t attrs;
    const gradd_val_t *in;
    int n_in, n_out;
    uint64_t random;
    bool no_merge; /* a node of its own, even if there is an equal one */
} graph_emit_t;

/* Instantiates the model for concrete input types. Errors name the node. */
gradd_status_t graph_create(const model_t *model, const graph_options_t *options,
                            graph_t **out_graph);
void graph_destroy(graph_t *graph);
static inline const gradd_type_t *graph_type(const graph_t *g, gradd_val_t v) {
    return &g->values[v]->type;
}
/* Whether the value is an input that the caller has named a parameter. */
bool graph_is_parameter(const graph_t *g, gradd_val_t v);
/* Whether it is an input whose gradient is wanted. */
bool graph_is_trained(const graph_t *g, gradd_val_t v);

/* Operands and results of a node as its row's functions take them. */
typedef struct graph_operands_s {
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t out[GRADD_OP_MAX_OUT];
} graph_operands_t;

/* A node that is there; points into *o. */
gradd_infer_t graph_describe(const graph_t *g, const graph_node_t *n, graph_operands_t *o);

/* What a node of the model becomes; `map` has the values of the model so far. A node in a body
 * keeps the origin of the model's node that has the body. */
gradd_status_t graph_add_node(graph_t *g, const model_node_t *n, gradd_val_t *map);
/* The same for If, Loop and Scan: their bodies in place of them (region.c). */
gradd_status_t graph_add_region(graph_t *g, const model_node_t *n, gradd_val_t *map);
/* The same for operators that take or give sequences, which have no row (sequence.c), and for an
 * Identity of a sequence. */
gradd_status_t graph_add_sequence(graph_t *g, const model_node_t *n, gradd_val_t *map);
/* Whether an operator of ONNX is one of these. */
bool graph_knows_sequence(const char *op_type);
/* Whether an entry of `map` is a sequence: no tensor, and no value of the graph. */
static inline bool graph_is_sequence(gradd_val_t v) {
    return v < GRADD_NONE;
}
/* Adds a node (or finds its equal, or folds it) and writes its n_out values. */
gradd_status_t graph_emit(graph_t *g, const graph_emit_t *emit, gradd_val_t *out);
/* Whether an operand is an integer of 8 or 16 bits that the operator does not take, but would in
 * i32. */
bool graph_has_small(const gradd_infer_t *c);
/* Whether that is so, or an operand is bf16 or f16 and no kernel takes the operands as they are;
 * graph_emit then calls the second, which puts the operator between casts (widen.c). */
bool graph_must_widen(const graph_t *g, const gradd_infer_t *c);
gradd_status_t graph_emit_widened(graph_t *g, const graph_emit_t *emit, gradd_val_t *out);
/* Whether the device runs that call, as it is or between casts. */
bool graph_has_kernel(const graph_t *g, const gradd_infer_t *c);
/* Whether the operator is written out in simpler ones here; graph_emit then calls the second, which
 * fills in c->out and emits the expansion of the row (expand.c). */
bool graph_must_expand(const graph_t *g, const gradd_infer_t *c);
gradd_status_t graph_emit_expanded(graph_t *g, const graph_emit_t *emit, gradd_infer_t *c,
                                   gradd_val_t *out);
/* A cast to f32 of a half product of the backward becomes a product with an f32 result. */
gradd_status_t graph_emit_wide_product(graph_t *g, const graph_emit_t *emit, gradd_val_t *out,
                                       bool *out_done);
/* A constant; the elements are copied. */
gradd_status_t graph_constant(graph_t *g, const gradd_type_t *type, const void *data,
                              gradd_val_t *out);
/* `root` is set here. */
gradd_status_t graph_new_value(graph_t *g, const graph_value_t *value, gradd_val_t *out);
/* Brings the nodes back into execution order after passes appended some: stable, and a node that
 * stood too late goes directly in front of its first reader. Roots of values are right again. */
gradd_status_t graph_sort(graph_t *g);
/* Whether both lists say the same in the same order. */
bool graph_same_attrs(gradd_attrs_t a, gradd_attrs_t b);
/* An attribute whose arrays belong to the graph's arena. */
gradd_status_t graph_copy_attr(graph_t *g, const gradd_attr_t *from, gradd_attr_t *to);
/* Rebuilds the table of equal nodes after nodes changed place. */
gradd_status_t graph_rehash(graph_t *g);
/* Output j of a node, created if the node did not have it yet. */
gradd_status_t graph_node_output(graph_t *g, int32_t node, int j, gradd_val_t *out);
/* Adds a second copy of all forward nodes in front of the backward, once. The clones read each
 * other and have no other readers. Numbers of backward nodes change: there is no program yet. */
gradd_status_t graph_clone_forward(graph_t *g);
static inline bool graph_is_clone(const graph_t *g, int32_t node) {
    return node >= g->n_forward && node < g->n_forward + g->n_clones;
}
/* The forward value that v computes again; v itself if it is no clone's. */
gradd_val_t graph_original(const graph_t *g, gradd_val_t v);
/* The value that computes v, which a forward node makes, again. */
gradd_status_t graph_clone_of(graph_t *g, gradd_val_t v, gradd_val_t *out);
/* The model's node that n comes from; one without a name if the model has no nodes. */
const model_node_t *graph_origin(const graph_t *g, const graph_node_t *n);
/* "node 17 'name' (Softmax)" for messages. */
const char *graph_node_text(const graph_t *g, const model_node_t *origin, char *buffer,
                            size_t bytes);

#define GRAPH_NODE_TEXT 256

/* Differentiation: appends the backward nodes for the outputs whose gradient arrives.
 * grads[i] is a model input; out_grads[i] its gradient or GRADD_NONE if there is no path. */
typedef struct autodiff_s {
    const int32_t *grads;
    int n_grads;
    const int32_t *grad_outputs; /* positions in graph->outputs */
    int n_grad_outputs;
    gradd_val_t *out_grads; /* caller's, n_grads entries */
} autodiff_t;

gradd_status_t graph_autodiff(graph_t *g, const autodiff_t *ad);

/* A model with its backward, all written out in simpler operators, as far as they have expansions;
 * out_grads as above, one per wanted gradient of `options`, of which the device does not matter.
 * Errors: those of gradd_plan_create. */
gradd_status_t graph_differentiate(const model_t *model, const gradd_plan_options_t *options,
                                   graph_t **out_graph, gradd_val_t *out_grads);

/* Rewrites, one per file in passes/. The number says in which phase a pass runs, and in which order
 * (phases.h). */
typedef struct graph_pass_s {
    const char *name;
    int order;       /* of PHASE_FORWARD or PHASE_JOINT */
    bool recognises; /* replaces what is there by something equal: left out of a plain plan */
    gradd_status_t (*apply)(graph_t *g);
    /* Operators of which it makes one, or takes one away, whenever it changes anything; none = any.
     * A library for a model that needs none of them has no such pass. */
    const char *makes[2];
} graph_pass_t;

/* Runs the passes of one phase, in a plain graph those that it does not leave out, and sorts. */
gradd_status_t graph_apply_passes(graph_t *g, phase_t phase);
/* The joint ones, over the graph with a backward that was just added. Entries of `grads` may be
 * replaced by others of the same type. */
gradd_status_t graph_apply_joint(graph_t *g, gradd_val_t *grads, int n_grads);

#endif
