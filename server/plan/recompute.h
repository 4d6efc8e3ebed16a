/* Internals of a plan that computes forward values again instead of keeping them from forward to
 * backward.
 *
 * The graph holds a clone of every forward node among its backward nodes. Which of them run follows
 * from one set, the roots that are kept: whatever else a backward node reads is read from a clone,
 * and clones read by the same rule. So the set is decided once per plan and serves every variant of
 * the backward. A clone runs directly in front of its first reader (passes/late_recomputation.c).
 *
 * Under a budget, an operator that works chunk by chunk (GRADD_OP_CHUNKED) offers another choice: a
 * set says how long its chunks are. Shorter chunks take less scratch memory, and change the
 * rounding of sums over them.
 *
 * recompute.c applies a set and says what it costs, recompute_chunks.c what shorter chunks cost,
 * recompute_search.c makes a sequence of sets that each need less memory and more time,
 * recompute_choose.c takes the one that the caller's budget or policy asks for. Engine thread. */
#ifndef GRADD_SERVER_PLAN_RECOMPUTE_H
#define GRADD_SERVER_PLAN_RECOMPUTE_H

#include "server/plan/plan.h"

/* Makes the backward nodes, and the gradients of `variant`, read a clone of every forward value
 * whose root is not kept. */
gradd_status_t recompute_apply(gradd_plan_t *plan, const bool *keep, int n_keep,
                               variant_t *variant);

/* The backwards that a plan is made for. */
typedef struct recompute_ends_s {
    variant_t *primary; /* Borrowed: the expected one */
    variant_t *all;     /* Borrowed: of everything that may arrive; NULL = the same */
} recompute_ends_t;

/* Decides what is kept (plan->saved) by the options of the plan, of which the backward has been
 * differentiated and nothing else been made. Errors: NOMEM if no set fits the budget. */
gradd_status_t recompute_choose(gradd_plan_t *plan, const recompute_ends_t *ends);
/* The curve of such a plan, which is of no other use afterwards. */
gradd_status_t recompute_curve(gradd_plan_t *plan, const recompute_ends_t *ends,
                               gradd_curve_t *out);

/* Chunks of MOST rows, half as many, ... */
#define RECOMPUTE_CHUNK_LEAST 64
#define RECOMPUTE_CHUNK_MOST  2048
#define RECOMPUTE_LEVELS      8

/* A forward node with the chunks that the graph gave it (level 0), and with shorter ones, of which
 * each takes less scratch than the one before. */
typedef struct chunked_s {
    int32_t node;
    int n, level; /* how many levels; the one that holds now */
    gradd_attrs_t attrs[RECOMPUTE_LEVELS];
    choice_t choices[RECOMPUTE_LEVELS];
    double us[RECOMPUTE_LEVELS];
    int since[RECOMPUTE_LEVELS]; /* the first set with this level or a later one; 0 = none */
} chunked_t;

/* The search's view of a plan: the sets it goes through, and what they take. */
typedef struct recompute_s {
    gradd_plan_t *plan; /* Borrowed */
    recompute_ends_t ends;
    bool *first_saved;  /* Owned, per root: what the backward reads if all is kept */
    int n_values;       /* of the arrays per value */
    bool *keep, *saved; /* Owned, per root: allowed to be kept; of these, those that are read */
    choice_t *choices;  /* Owned, per node, once it is known */
    double *us;         /* Owned, per forward node: modelled time of computing it again */
    chunked_t *chunked; /* Owned */
    int n_chunked;
    sequence_t sequence; /* Owned: forward and expected backward, in order */
    int64_t *in_use;     /* Owned: bytes at each position of it */
    int peak;            /* position with the most bytes in use, the first of them */
    int n_peak;          /* how many positions have that */
    double extra_us;     /* of the clones in the sequence, and of shorter chunks */
    double total_us;     /* of the plan that keeps everything */
} recompute_t;

/* Starts with everything kept. */
gradd_status_t recompute_begin(gradd_plan_t *plan, const recompute_ends_t *ends, recompute_t *out);
/* Looks for operators whose chunks may be shorter. Without it there are none. */
gradd_status_t recompute_find_chunks(recompute_t *r);
void recompute_set_level(recompute_t *r, chunked_t *c, int level);
/* The scratch that the next level spares; 0 = there is none. */
int64_t recompute_spared(const chunked_t *c);
/* The sequence, bytes in use and time with what r->keep and the levels say. */
gradd_status_t recompute_measure(recompute_t *r);
void recompute_finish(recompute_t *r);

/* One after the other, with growing numbers: root v is not kept in sets from dropped[v] on; 0 =
 * always kept. Set 0 keeps everything. */
typedef struct recompute_sets_s {
    int32_t *dropped; /* Owned, per root */
    int64_t *peak;    /* Owned, per set: the most bytes in use at once */
    int n, cap;       /* of sets, with set 0 */
    int layers;       /* the last set that keeps what lies between layers */
} recompute_sets_t;

gradd_status_t recompute_search(recompute_t *r, recompute_sets_t *out);
void recompute_sets_finish(recompute_sets_t *sets);

#endif
