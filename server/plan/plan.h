/* A plan: a graph with its gradient, ordered, placed in memory, ready to run.
 *
 *   graph --schedule--> sequence of nodes --choose--> their kernels --passes--> their order
 *   --layout--> a place for every value --program--> launches
 *
 * A run has one arena. Forward and the expected backward are placed jointly, so that gradients fit
 * where dead activations were. Values that a backward needs ("saved") keep their place. A backward
 * for other arriving gradients, or one that must keep the activations (retain_graph), is a variant:
 * laid out around the saved values when it first happens, then cached.
 *
 * One thread at a time makes, runs or ends a plan; several plans may be made at once. It is used by
 * one launch at a time, so runs may take turns between two.
 */
#ifndef GRADD_SERVER_PLAN_PLAN_H
#define GRADD_SERVER_PLAN_PLAN_H

#include "kernels/contract/backend.h"
#include "server/api/gradd.h"
#include "server/device/device.h"
#include "server/graph/graph.h"

typedef enum loc_kind_e {
    LOC_NONE,        /* absent */
    LOC_ARENA,       /* offset into the run's arena */
    LOC_INPUT,       /* index = model input */
    LOC_OUTPUT,      /* index = position in the plan's outputs */
    LOC_GRAD,        /* index = position in the plan's gradients */
    LOC_EARLY,       /* the same: where the forward has formed it */
    LOC_GRAD_OUTPUT, /* index = position in the plan's outputs */
    LOC_CONST,       /* index = block of the plan's constants, offset into it */
    LOC_HOST,        /* offset = address of a known value in the process's memory */
} loc_kind_t;

typedef struct loc_s {
    loc_kind_t kind;
    int32_t index;
    int64_t offset;
} loc_t;

/* The kernel that runs a node. */
typedef struct choice_s {
    const gradd_kernel_t *kernel; /* NULL: a view, or there is no element to write */
    gradd_prepared_t prepared;    /* the state is Borrowed from the plan */
} choice_t;

/* A kernel's prepared state, for all nodes of a plan that are the same to it. */
typedef struct ready_s ready_t;
#define PLAN_READY_BUCKETS 256

/* A list of nodes in execution order, with the values that must leave it. */
typedef struct sequence_s {
    int32_t *nodes;    /* Owned */
    choice_t *choices; /* Owned: per node, once they are made */
    int n;
    int n_forward; /* of these, in front: forward nodes */
} sequence_t;

/* A value to be copied to an external place, because it cannot be produced there. */
typedef struct copy_s {
    gradd_val_t from;
    loc_t to;
    bool after_forward; /* else after backward */
} copy_t;

/* Where everything lies while a sequence runs. Arrays are per value of the graph. */
typedef struct layout_s {
    int n_values;
    loc_t *loc;         /* Owned; of roots: a view shares the place of what it views */
    int64_t *workspace; /* Owned; scratch offset per position of the sequence, -1 = none */
    copy_t *copies;
    int n_copies;
    int64_t arena_bytes, saved_bytes;
} layout_t;

typedef struct layout_options_s {
    const sequence_t *sequence;
    const bool *saved;  /* per value (root): keeps its bytes until the sequence ends its use */
    const loc_t *fixed; /* per value (root): place given by an earlier layout; NULL = none */
    int n_fixed;        /* entries of saved and fixed */
    bool keep;          /* fixed places may not be reused */
    const gradd_val_t *grads; /* per plan gradient: value or GRADD_NONE; NULL = forward only */
    int n_grads;
    bool place_outputs; /* the sequence holds the forward: bind or copy outputs */
} layout_options_t;

typedef struct plan_launch_s {
    const gradd_kernel_t *kernel;
    gradd_launch_t args; /* in and out point to the views below; workspace is set per run */
    gradd_view_t *view;  /* n_in + n_out: data is set per run */
    loc_t *loc;          /* n_in + n_out */
    int64_t workspace;   /* offset or -1 */
    int64_t workspace_bytes;
    int32_t node; /* of the graph; -1 = a copy */
    bool large;   /* an operand, or the scratch memory, has DEVICE_MUCH bytes */
} plan_launch_t;

typedef struct program_s {
    arena_t *arena; /* Owned: launches */
    plan_launch_t *launches;
    int n;
    loc_t *external; /* inputs, outputs and gradients that the launches touch, each once */
    int n_external;
    int32_t *nodes; /* of the graph, in order of execution, with views and empty ones */
    int n_nodes;
} program_t;

typedef struct variant_s {
    bool *arrives; /* Owned: per plan output */
    bool keep;
    bool full;          /* serves any set of arriving gradients: absent ones are zeros */
    gradd_val_t *grads; /* Owned: per plan gradient */
    program_t program;
    int32_t *final; /* Owned: per plan gradient, as in gradd_plan_info_t */
    int64_t arena_bytes;
    struct variant_s *next;
} variant_t;

typedef struct constant_block_s {
    void *memory; /* Owned: of the device */
    int64_t bytes;
} constant_block_t;

/* The constants that launches read. The forward and the expected backward have one block; a
 * backward that is compiled later adds one if it reads others. */
typedef struct constants_s {
    loc_t *loc; /* Owned: per value of the graph; LOC_NONE = not in a block */
    int n;
    constant_block_t *blocks; /* Owned */
    int n_blocks;
    int64_t waiting_bytes; /* of the block that comes next */
    int64_t bytes;         /* of all blocks */
} constants_t;

struct plan_s {
    graph_t *graph;         /* Owned */
    gradd_device_t *device; /* Borrowed: that runs it */
    gradd_plan_info_t info;
    gradd_plan_options_t options; /* lists: Owned */
    gradd_type_t *output_types;   /* Owned */
    bool *has_grad;               /* Owned */
    gradd_val_t *early;   /* Owned: per gradient, what the forward forms of it, GRADD_NONE */
    bool *is_early;       /* Owned: whether there is one */
    const int32_t *grads; /* those of the options: model inputs */
    int n_grads;
    const int32_t *grad_outputs; /* those of the options: positions whose gradient may arrive */
    int n_grad_outputs;
    bool *saved;  /* Owned: per value (root) of the graph when the forward was laid out */
    loc_t *fixed; /* Owned: their places */
    int n_fixed;
    constants_t constants;
    program_t forward;
    variant_t *variants; /* Owned list; the first is the expected backward */
    int n_variants;
    ready_t *ready[PLAN_READY_BUCKETS]; /* Owned: hash table */
    int64_t ready_bytes;                /* that kernels have prepared */
};

/* The value whose bytes v shares: follows view operators to their operand. */
gradd_val_t plan_root(const graph_t *g, gradd_val_t v);

/* How many of its operands a node needs when it runs: of a view, only what it is a view of. */
int plan_reads(const graph_node_t *n);

/* True if the node has no element to write: it is not run. [2^40, 0] is such a shape, and a kernel
 * that loops over its rows would not come back. */
bool plan_writes_nothing(const graph_t *g, const graph_node_t *n);

/* Nodes that the outputs (forward) and the gradients of one variant (backward) need, in order.
 * `extra` are forward values that must be computed as well. */
gradd_status_t schedule_forward(const graph_t *g, const bool *extra, sequence_t *out);
gradd_status_t schedule_backward(const graph_t *g, const gradd_val_t *grads, int n_grads,
                                 sequence_t *out);
void sequence_finish(sequence_t *sequence);
/* Marks (by root) the forward values that the backward nodes of `sequence` and `grads` read. */
void schedule_mark_saved(const graph_t *g, const sequence_t *sequence, const gradd_val_t *grads,
                         int n_grads, bool *saved);

/* The cost of a sequence (kernels/describe/cost.h). */
typedef struct plan_cost_s {
    double flops, bytes, again;
    int launches;
} plan_cost_t;

/* How many of the device's threads a plan of that cost takes: all, or one. */
int plan_threads(const plan_cost_t *cost, int threads);
/* Microseconds by a model: so much arithmetic or so many bytes, whichever takes longer, then the
 * repeated moves, and a little per launch. Good for comparing, not for a clock. */
double plan_cost_us(const plan_cost_t *cost, int threads);

/* Chooses the device's kernel for every node and prepares it. The first sequence of a plan, its
 * forward with the expected backward, decides its threads. Equal nodes share a state, which lives
 * as long as the plan. Errors name the node: UNSUPPORTED if there is no kernel, LIMIT. */
gradd_status_t plan_choose(gradd_plan_t *plan, sequence_t *sequence);
/* The same for one node, once the plan's threads are known; it may be a copy of one of the graph.
 */
gradd_status_t plan_choose_node(gradd_plan_t *plan, const graph_node_t *node, choice_t *out);
/* Launches that take longer by the model, on a device that is the calling thread, are made in parts
 * of about that time, if their kernel can. Between two parts a request may be put aside. Processors
 * take up to twice as long as the model's. */
#define PLAN_PART_US 15000
/* The same model for a node of the plan, once its threads are known. */
double plan_node_us(const gradd_plan_t *plan, const graph_node_t *node, const choice_t *choice);
/* In how many parts so many bytes are copied; 0: as a whole. */
int plan_copy_parts(const gradd_plan_t *plan, int64_t bytes);
/* Gives back what the kernels have prepared. */
void plan_unprepare(gradd_plan_t *plan);

/* A pass of the phase "placed", one per file in passes/; see server/graph/phases.h. It may change
 * the order of a sequence within its forward and its backward, kernels along with their nodes, but
 * what a node reads stays in front of it. */
typedef struct placed_pass_s {
    const char *name;
    int order; /* of PHASE_PLACED */
    gradd_status_t (*apply)(gradd_plan_t *plan, sequence_t *sequence);
} placed_pass_t;

gradd_status_t plan_apply_passes(gradd_plan_t *plan, sequence_t *sequence);

/* Those of a plan's forward with its expected backward, or of a forward alone (NULL). */
layout_options_t layout_of_plan(const gradd_plan_t *plan, const sequence_t *sequence,
                                const bool *saved, int n_saved, const variant_t *backward);
gradd_status_t layout_make(const graph_t *g, const layout_options_t *options, layout_t *out);
/* in_use[k], n + 1 of them: bytes in use at position k. Far quicker than a layout, whose arena has
 * at least the largest of them. */
gradd_status_t layout_in_use(const graph_t *g, const layout_options_t *options, int64_t *in_use);
void layout_finish(layout_t *layout);

/* One buffer to be placed: lives from `start` to `end` (positions, inclusive). offset < 0: choose.
 */
typedef struct memory_item_s {
    int64_t bytes;
    int64_t offset;
    int start, end;
} memory_item_t;

/* Up to this many items are packed tightly, in quadratic time; a large model has some thousands. */
#define MEMORY_BY_SIZE_MAX 20000

/* Chooses offsets so that no two items that live at the same time overlap; returns the peak.
 * Errors: LIMIT (sizes that 64 bits cannot add), NOMEM. */
gradd_status_t memory_place(memory_item_t *items, int n, int64_t *out_peak);

/* The place of a known value for a launch, which is filled by the next upload. */
gradd_status_t constants_place(gradd_plan_t *plan, gradd_val_t v, loc_t *out);
/* Copies the values that were placed since the last upload to the device. */
gradd_status_t constants_upload(gradd_plan_t *plan);
void constants_finish(gradd_plan_t *plan);

/* Launches [from, to) of the sequence, and the copies that follow them. */
gradd_status_t program_make(gradd_plan_t *plan, const sequence_t *sequence, const layout_t *layout,
                            bool forward, program_t *out);
void program_finish(program_t *program);

/* A plan of k outputs has 2^k sets of arriving gradients; each variant costs memory. From this many
 * on one variant serves all further sets. */
#define PLAN_MAX_VARIANTS 16

/* A variant with the gradient nodes for the outputs in `arrives`, not laid out yet. */
gradd_status_t variant_differentiate(gradd_plan_t *plan, const bool *arrives, variant_t **out);
void variant_destroy(variant_t *variant); /* accepts NULL */
/* out[j]: whether a gradient may arrive for output j. */
void plan_all_arrivals(const gradd_plan_t *plan, bool *out);
/* Marks what the backward of a variant reads from the forward. */
gradd_status_t plan_mark_saved(const gradd_plan_t *plan, const variant_t *variant, bool *saved);
/* Forward nodes, then the nodes of the expected backward (NULL = none). */
gradd_status_t plan_join(const gradd_plan_t *plan, const variant_t *primary, const bool *saved,
                         sequence_t *out);
/* Counts what the plan holds beside the arenas of its runs. */
void plan_count_bytes(gradd_plan_t *plan);
/* Looks in the program of a variant for the launch behind which each gradient is final. */
gradd_status_t variant_find_final(const gradd_plan_t *plan, variant_t *variant);
/* Backward for exactly these arriving gradients; compiled when first asked for. */
gradd_status_t plan_variant(gradd_plan_t *plan, const bool *arrives, bool keep,
                            const variant_t **out);

#endif
