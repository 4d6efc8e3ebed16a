/* The operator contract: everything that is true of one operator on every device, in one row.
 *
 * Adding an operator means adding one row to one file kernels/ops/<kind>/<family>.c. The row holds
 * its ONNX name, domain and opset range, arity, attributes, element types, shape rule, gradient
 * rule, definition and test cases. How a device runs it is a row of its own behind it
 * (kernels/contract/kernel.h). There is no enum of operators: a node points to its row.
 *
 * Shapes are always concrete here. The engine compiles a graph once per tuple of input shapes, so
 * the shape rule sees numbers, and inputs whose elements are known at compile time (shape
 * arithmetic, axes, constants) arrive with `data` set.
 *
 * Threading: rows are constant; infer and grad run on the engine thread; kernels may open OpenMP
 * regions and must give the same bits for the same number of threads.
 */
#ifndef GRADD_KERNELS_CONTRACT_OP_H
#define GRADD_KERNELS_CONTRACT_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/dtype.h"
#include "shm/status.h"
#include "shm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- values and attributes ------------------------------------------------------------------- */

/* A tensor a kernel or rule can see. `type.dtype == GRADD_DT_NONE` marks an absent optional input
 * or output. In infer, `data` is non-NULL only if the elements are known at compile time. Elements
 * are contiguous, row-major. */
typedef struct gradd_view_s {
    gradd_type_t type;
    void *data; /* Borrowed */
} gradd_view_t;

typedef enum gradd_attr_kind_e {
    GRADD_ATTR_END = 0, /* ends a table of gradd_attr_spec_t */
    GRADD_ATTR_INT,
    GRADD_ATTR_FLOAT,
    GRADD_ATTR_STRING,
    GRADD_ATTR_INTS,
    GRADD_ATTR_FLOATS,
    GRADD_ATTR_TENSOR,
    GRADD_ATTR_GRAPH /* reserved for control flow */
} gradd_attr_kind_t;

typedef struct gradd_attr_s {
    const char *name; /* Borrowed */
    gradd_attr_kind_t kind;
    int64_t i;
    double f;
    const char *s;       /* Borrowed, NUL-terminated; n bytes */
    const int64_t *ints; /* Borrowed; n entries */
    const double *floats;
    size_t n;
    gradd_view_t tensor;
} gradd_attr_t;

typedef struct gradd_attrs_s {
    const gradd_attr_t *v; /* Borrowed */
    int n;
} gradd_attrs_t;

/* NULL if the attribute is absent. */
const gradd_attr_t *gradd_attr_find(gradd_attrs_t attrs, const char *name);
int64_t gradd_attr_int(gradd_attrs_t attrs, const char *name, int64_t otherwise);
double gradd_attr_float(gradd_attrs_t attrs, const char *name, double otherwise);
const char *gradd_attr_string(gradd_attrs_t attrs, const char *name, const char *otherwise);

typedef struct gradd_attr_spec_s {
    const char *name;
    gradd_attr_kind_t kind;
    bool required;
} gradd_attr_spec_t;

/* ---- contexts -------------------------------------------------------------------------------- */

#define GRADD_OP_MAX_IN  64 /* variadic operators included */
#define GRADD_OP_MAX_OUT 64

typedef struct gradd_op_s gradd_op_t;

/* Shape rule: fill out[0..n_out) from in and attrs. Outputs the node does not want may be filled
 * all the same. Arity, dtypes (row masks) and attribute names have been checked before. */
typedef struct gradd_infer_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int opset;
    int n_in, n_out;
    const gradd_view_t *in;
    gradd_type_t *out;
    int threads; /* of the plan, for what kernels prepare; 0 = as many as the process may use */
    int parts;   /* in so many, where the kernel can, a launch is to be made; 0 = as a whole */
} gradd_infer_t;

/* A launch: one execution of a kernel. Outputs never overlap inputs, except that out[0] may be
 * exactly in[k] for a k in the kernel's `inplace` mask. An unwanted optional output has data ==
 * NULL. */
typedef struct gradd_launch_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int opset;
    int n_in, n_out;
    const gradd_view_t *in;
    const gradd_view_t *out;
    void *workspace;  /* scratch, as much as the kernel asked for, aligned to 64; else NULL */
    void *state;      /* Borrowed; what the kernel prepared for calls like this one, else NULL */
    uint64_t seed;    /* of the forward call: first Philox coordinate */
    uint64_t node;    /* index of the node in the ONNX bytes: second Philox coordinate */
    bool dropout_off; /* run flag: dropout passes its input through, random numbers are fixed */
    int launch;       /* what a device names if the launch fails later */
    int threads; /* those that workspace() was asked for. Parallel regions take the number that the
                    queue was entered with, which is the same */
    int part, parts; /* of a kernel that has prepared for parts: this one, of all; else 0 */
    const struct gradd_cut_s *cut; /* Borrowed: as prepared */
} gradd_launch_t;

/* A value of the graph under construction. */
typedef int32_t gradd_val_t;
#define GRADD_NONE ((gradd_val_t) - 1)

/* A node to be added. */
typedef struct gradd_emit_s {
    const char *op;
    const gradd_val_t *in; /* GRADD_NONE = absent */
    int n_in;
    const gradd_attr_t *attrs;
    int n_attrs;
} gradd_emit_t;

/* Builder interface that gradient rules use; server/graph implements it, so that kernels/ need not
 * include upwards. Failures are sticky: after the first one every call returns GRADD_NONE and the
 * engine reports it; an operand GRADD_NONE where one is required is such a failure. */
typedef struct gradd_builder_s gradd_builder_t;
struct gradd_builder_s {
    /* Adds a node, infers its types (known inputs are folded), writes n_out output values. */
    gradd_status_t (*emit)(gradd_builder_t *b, const gradd_emit_t *node, gradd_val_t *out,
                           int n_out);
    gradd_val_t (*constant)(gradd_builder_t *b, const gradd_type_t *type, const void *data);
    const gradd_type_t *(*type)(gradd_builder_t *b, gradd_val_t value);
    const void *(*data)(gradd_builder_t *b, gradd_val_t value); /* NULL unless known now */
    gradd_status_t status;
};

/* Gradient rule: for every i with need[i], set din[i] to the gradient of in[i] (same type as
 * in[i]), or leave GRADD_NONE for an exact zero. dout[j] is GRADD_NONE if no gradient arrives for
 * out[j]. */
typedef struct gradd_grad_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int opset;
    int n_in, n_out;
    const gradd_val_t *in;
    const gradd_val_t *dout;
    const bool *need;
    gradd_val_t *din;
    uint64_t node; /* Philox coordinate of the forward node */
    gradd_builder_t *b;
    /* Value of output j, which is created on the forward node if that did not have it yet (saved
     * statistics, masks). Use this function, not a stored id. */
    gradd_val_t (*output)(struct gradd_grad_s *g, int j);
} gradd_grad_t;

/* Expansion: the operator in simpler ones. Sets out[j] for every j < n_out, each of the type that
 * the shape rule gives. Where the operator takes bf16 and f16 it computes in f32 and rounds where
 * the operator does. Random operators that it emits have the Philox coordinate of the operator's
 * node. Its derivative is the operator's own. */
typedef struct gradd_expand_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int opset;
    int n_in, n_out;
    const gradd_val_t *in;
    gradd_val_t *out;
    gradd_builder_t *b;
} gradd_expand_t;

/* Rule of live rows: how the operator treats the leading axes of its operands, whose elements are
 * the rows of a batch (a token's position each). The caller fills what describes a node, `lead` (at
 * least 1) and `rows`: the first `lead` axes of every output are the rows, `rows` in all. An
 * operator that makes each row of all outputs from that row of its operands alone sets use[i] and
 * in_lead[i] of every operand and returns true; then it gives the same with fewer rows: with the
 * leading axes (1, ..., 1, k) in place of the ones there are. Attributes keep their meaning, for
 * ranks do not change. */
typedef enum gradd_use_e {
    GRADD_USE_WHOLE,  /* the same for all rows */
    GRADD_USE_ROWS,   /* its first in_lead[i] axes are the rows */
    GRADD_USE_SPREAD, /* broadcast along some of the leading axes, in_lead[i] = `lead` counted from
                         the right as broadcasting does: to be expanded first */
} gradd_use_t;

typedef struct gradd_rowwise_s {
    const gradd_op_t *op;
    gradd_attrs_t attrs;
    int n_in, n_out;
    const gradd_view_t *in; /* data where it is known */
    const gradd_type_t *out;
    int lead;
    int64_t rows;
    gradd_use_t use[GRADD_OP_MAX_IN];
    int in_lead[GRADD_OP_MAX_IN];
    bool resizes; /* out[0] is in[0] in other sizes, whatever the further operands and attributes */
    int takes_rows; /* the operand that says which rows there are, absent over all of them: random
                       numbers depend on an element's place among all; 0 = none */
} gradd_rowwise_t;

/* ---- the row --------------------------------------------------------------------------------- */

enum {
    GRADD_OP_VIEW = 1 << 0,       /* out[0] has the bytes of in[0] in the same order: never run if
                                     the planner can alias; kernels copy. Further inputs are read
                                     when the graph is built, or by the gradient rule alone */
    GRADD_OP_SHAPE_ONLY = 1 << 1, /* reads the shapes of its inputs only: known at compile time */
    GRADD_OP_RANDOM = 1 << 2,     /* never folded, merged or reordered */
    GRADD_OP_NO_GRAD = 1 << 3,  /* the marker "not differentiable": gradient is zero or undefined */
    GRADD_OP_INTERNAL = 1 << 4, /* only gradient rules and passes emit it; refused from a model */
    GRADD_OP_CHEAP = 1 << 5,    /* cheap to recompute in backward */
    GRADD_OP_SAME_IS_IDENTITY = 1 << 6, /* out[0] == in[0] whenever their types are equal (Cast,
                                           Expand); implied by VIEW */
    GRADD_OP_COSTLY = 1 << 7,  /* time grows like the product of the sizes of operands and result */
    GRADD_OP_FLAT = 1 << 8,    /* beside NO_GRAD: constant between steps. Its gradient is zero, not
                                  absent: as in torch, what it makes depends on its inputs */
    GRADD_OP_CHUNKED = 1 << 9, /* takes the attribute "chunk": how many rows of in[0] it works on at
                                  a time, 0 = all. Fewer take less scratch and more time */
    GRADD_OP_UNPACKS = 1 << 10, /* cheap, and its result takes several times the memory of what it
                                   reads: never held longer than its reader needs it */
};

#define GRADD_OP_MAX_TYPES 10

/* One test case, see kernels/cases/cases.h for the little language. */
typedef struct gradd_case_s {
    const char *text;
    double tol;      /* relative tolerance of the forward comparison; 0 = 1e-5 */
    double grad_tol; /* of the finite-difference comparison in f64; 0 = 1e-5 */
    /* Of results in bf16, relative to their largest entry, where the operator rounds on the way;
     * 0 = it rounds each entry once. */
    double bf16_tol;
} gradd_case_t;

struct gradd_op_s {
    const char *name;
    const char *domain; /* "" = ai.onnx, "com.gradd" = ours; names are unique across domains */
    int since, until;   /* opset range, inclusive; until 0 = open */
    int min_in, max_in, min_out, max_out;
    uint32_t flags;
    uint32_t no_diff; /* bit k: input k carries no gradient although it is a float: it is zero */
    uint32_t no_rule; /* bit k: it has one that the rule does not give; differentiating fails */
    uint32_t counts;  /* bit j: output j holds integers or booleans, whatever the inputs are */
    /* Output j is the gradient of input formed[j] - 1 for a gradient of 1 of output 0, which only
     * ScaleGrad reads; 0 = it is none. */
    uint8_t formed[4];
    /* Element types (GRADD_DTB bits) of the first inputs for which it is defined; the last non-zero
     * entry repeats; all zero = anything. Which of them a kernel takes, its own row says. */
    uint32_t types[GRADD_OP_MAX_TYPES];
    const gradd_attr_spec_t *attrs; /* ended by {0}; NULL = none */
    gradd_status_t (*infer)(gradd_infer_t *c);
    gradd_status_t (*grad)(gradd_grad_t *g); /* NULL with GRADD_OP_NO_GRAD */
    bool (*rowwise)(
        gradd_rowwise_t *r); /* kernels/rules/rowwise.h has the usual ones; NULL = never */
    /* A row that has this alone, neither grad nor ref, is a composite: it is always expanded.
     * Others are where the device has no kernel, and in plain plans. NULL: there is nothing
     * simpler. */
    gradd_status_t (*expand)(gradd_expand_t *x);
    /* The plain loop that defines the operator. It runs on the host, in f32 and f64 at least, with
     * the scratch that the CPU's kernel asks for. Only tests call it: a library for small devices
     * leaves it out, and the row says whether there is one. */
#ifdef GRADD_NO_CASES
    bool ref;
#else
    gradd_status_t (*ref)(const gradd_launch_t *r);
#endif
    const gradd_case_t *cases; /* ended by {0} */
};

typedef struct gradd_ops_s {
    const char *file; /* family */
    const gradd_op_t *v;
    size_t n;
} gradd_ops_t;

/* The mask for input i in a list of masks of an operator's or a kernel's row; 0 = anything. */
static inline uint32_t gradd_types_at(const uint32_t *types, int input) {
    uint32_t mask = 0;
    for (int i = 0; i < GRADD_OP_MAX_TYPES && i <= input && types[i]; i++)
        mask = types[i];
    return mask;
}

/* A view through which passes may look: its operand has the same gradient as its result. */
static inline bool gradd_op_is_transparent(const gradd_op_t *op) {
    return op->flags & GRADD_OP_VIEW && !(op->flags & GRADD_OP_NO_GRAD) && !(op->no_diff & 1);
}

/* Whether it runs as its expansion on every device. */
static inline bool gradd_op_is_composite(const gradd_op_t *op) {
    return op->expand && !op->grad && !op->ref;
}

/* A row: its name, domain and first opset, how many inputs and outputs it has at least and at most,
 * and by name whatever else is not zero. */
#define GRADD_OP(title, of_domain, first_opset, inputs, outputs, ...)                              \
    {.name = title,                                                                                \
     .domain = of_domain,                                                                          \
     .since = first_opset,                                                                         \
     GRADD_OP_IN inputs,                                                                           \
     GRADD_OP_OUT outputs,                                                                         \
     __VA_ARGS__}
#define GRADD_OP_IN(least, most)  .min_in = least, .max_in = most
#define GRADD_OP_OUT(least, most) .min_out = least, .max_out = most

/* Ends every kernels/ops/<kind>/<family>.c: GRADD_OPS(family, GRADD_OP(...), GRADD_OP(...));
 * `family` = the file name. */
#define GRADD_OPS(family, ...)                                                                     \
    static const gradd_op_t gradd_op_rows_##family[] = {__VA_ARGS__};                              \
    extern const gradd_ops_t gradd_ops_##family;                                                   \
    const gradd_ops_t gradd_ops_##family = {#family, gradd_op_rows_##family,                       \
                                            sizeof gradd_op_rows_##family /                        \
                                                sizeof gradd_op_rows_##family[0]}

#define GRADD_ATTR_LIST(...)                                                                       \
    (const gradd_attr_spec_t[]) {                                                                  \
        __VA_ARGS__, {0}                                                                           \
    }
/* A library for small devices leaves references and cases out, and GRADD_EXPANSION: that of an
 * operator which the CPU has a kernel for. */
#ifdef GRADD_NO_CASES
#define GRADD_REF(function)       (sizeof(&(function)) > 0)
#define GRADD_EXPANSION(function) ((gradd_status_t (*)(gradd_expand_t *))(sizeof(&(function)) == 0))
#define GRADD_CASES(...)          NULL
#else
#define GRADD_REF(function)       function
#define GRADD_EXPANSION(function) function
#define GRADD_CASES(...)                                                                           \
    (const gradd_case_t[]) {                                                                       \
        __VA_ARGS__, {0}                                                                           \
    }
#endif

/* Common dtype masks of operators: wherever one is defined for floats, bf16 and f16 are among
 * them. */
#define GRADD_T_FLOAT (GRADD_T_BF16_F32_F64 | GRADD_DTB(F16))
#define GRADD_T_INT   (GRADD_DTB(I64) | GRADD_DTB(I32))
#define GRADD_T_NUM   (GRADD_T_FLOAT | GRADD_T_INT)
#define GRADD_T_BOOL  GRADD_DTB(BOOL)
#define GRADD_T_ALL   (GRADD_T_NUM | GRADD_T_BOOL)
#define GRADD_T_INDEX GRADD_T_INT
/* For kernels that do not read f16, or neither bf16, themselves: they get casts to f32 around them
 * when a graph is built. Outputs that are statistics (means, sums of exponentials) stay f32. */
#define GRADD_T_F32_F64      (GRADD_DTB(F32) | GRADD_DTB(F64))
#define GRADD_T_BF16_F32_F64 (GRADD_T_F32_F64 | GRADD_DTB(BF16))
/* For kernels that read all that their operator takes, f16 as well (kernels/contract/kernel.h). */
#define GRADD_T_ANY 0xffffffffu

#ifdef __cplusplus
}
#endif
#endif
