/* How a device runs an operator: kernel rows.
 *
 * A family's rows for the CPU stand behind its operators in the same file, those for another device
 * in a file of the family's name in the device's folder. Several rows may name one operator, the
 * fastest first: the first that takes the element types of the operands and accepts the node is the
 * one that runs. An operand in bf16 or f16 that no row takes gets a cast to f32 in front of it when
 * the graph is built.
 *
 * Threading: rows are constant; compute may open OpenMP regions and must give the same bits for the
 * same number of threads; the other functions run on the thread that makes the plan, or
 * ends it.
 */
#ifndef GRADD_KERNELS_CONTRACT_KERNEL_H
#define GRADD_KERNELS_CONTRACT_KERNEL_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cost of one launch, by its types alone (kernels/describe/cost.h). */
typedef struct gradd_cost_s {
    double flops;          /* additions and multiplications */
    int64_t read, written; /* bytes of operands and results */
    double again;          /* bytes of these that are moved once more, while arithmetic waits */
} gradd_cost_t;

/* A kernel's preparation for launches with certain operands, one at a time.
 *
 * Where a launch is to be made in parts (c->parts), a kernel may prepare for that: compute is then
 * called once for each part, in order, with the same operands and workspace. Parts write rows of
 * their own, and which is a matter of the types alone: so a launch has the same bits whatever runs
 * between two parts. Launches of other kernels are cut by rows (cut.h) where the operator's rows do
 * not depend on each other. */
typedef struct gradd_prepared_s {
    size_t workspace; /* scratch bytes of a launch */
    void *state;      /* Owned by the preparing kernel; given back with unprepare; NULL = none */
    size_t bytes;     /* that the state holds */
    int parts;        /* 0 = compute does all at once */
    struct gradd_cut_s *cut; /* Owned: by which the parts are made; NULL = compute makes them */
} gradd_prepared_t;

typedef struct gradd_kernel_s {
    const char *op;   /* the operator's name */
    const char *name; /* what explain prints: "loop", "oneDNN f32" */
    /* Element types that it takes, like those of the operator's row; what the operator refuses
     * needs no mention. All zero = those of the operator, f16 only where that takes anything. */
    uint32_t types[GRADD_OP_MAX_TYPES];
    uint32_t inplace; /* bit k: out[0] may overwrite in[k] if their types are equal */
    /* Bit k: in[k] is read by the host, in its own memory. The row runs a node only where that
     * operand is absent or known when the plan is made. */
    uint32_t host_in;
    /* Whether it runs this node; NULL = always. c->out is not known yet. */
    bool (*accepts)(const gradd_infer_t *c);
    gradd_status_t (*compute)(const gradd_launch_t *r);
    size_t (*workspace)(const gradd_infer_t *c); /* scratch bytes; NULL = none. c->out is set */
    /* For kernels with a state, in place of workspace: calls with these operands follow, on as many
     * threads as OpenMP would take now. c->out is set; in and out are not kept. */
    gradd_status_t (*prepare)(const gradd_infer_t *c, gradd_prepared_t *out);
    void (*unprepare)(gradd_prepared_t *prepared);
    /* Of a kernel without a state, where a launch is not cut by rows: how many parts compute makes
     * of it, about c->parts, but none that would leave threads idle. Such parts may go on with what
     * the ones before have left in the workspace. NULL = it makes none. */
    int (*parts)(const gradd_infer_t *c);
    /* It makes parts itself, or none: see prepare. */
    bool makes_parts;
    /* By which rule launches are cut, if not by the operator's (gradd_rowwise_t in op.h). */
    bool (*rowwise)(gradd_rowwise_t *r);
    /* Corrects what gradd_kernel_cost (kernels/describe/cost.h) has filled in: one operation per
     * element of the largest tensor, all operands read, all results written. NULL = that is right.
     */
    void (*cost)(const gradd_infer_t *c, gradd_cost_t *cost);
    /* Without types of its own it takes those of the operator but f16, which is widened around it:
     * rows of the CPU, which compute in f32. Those of a GPU read it. */
    bool widens_f16;
} gradd_kernel_t;

/* The rows of a family for one device. */
typedef struct gradd_kernels_s {
    const char *file; /* family */
    const gradd_kernel_t *v;
    size_t n;
} gradd_kernels_t;

/* A row: the operator that it runs, its name, and by name whatever else is not zero. */
#ifdef __cplusplus /* a row of a GPU */
#define GRADD_KERNEL(of_op, title, ...) {.op = of_op, .name = title, __VA_ARGS__}
#else
#define GRADD_KERNEL(of_op, title, ...)                                                            \
    {.op = of_op, .name = title, .widens_f16 = true, __VA_ARGS__}
#endif

/* Behind GRADD_OPS in kernels/ops/<kind>/<family>.c: GRADD_KERNELS(cpu, family, GRADD_KERNEL(...)).
 */
#define GRADD_KERNELS(device, family, ...)                                                         \
    static const gradd_kernel_t gradd_##device##_rows_##family[] = {__VA_ARGS__};                  \
    extern const gradd_kernels_t gradd_##device##_kernels_##family;                                \
    const gradd_kernels_t gradd_##device##_kernels_##family = {                                    \
        #family, gradd_##device##_rows_##family,                                                   \
        sizeof gradd_##device##_rows_##family / sizeof gradd_##device##_rows_##family[0]}

/* Whether the row takes that dtype as input i of its operator. */
bool gradd_kernel_takes(const gradd_kernel_t *kernel, const gradd_op_t *op, int input,
                        gradd_dtype_t dtype);

/* Scratch and state for calls with these operands; c->out is set. */
gradd_status_t gradd_kernel_prepare(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                                    gradd_prepared_t *out);
/* All of a launch, or the part launch->part, by a kernel that computes in the calling thread. */
gradd_status_t gradd_kernel_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch);
void gradd_kernel_unprepare(const gradd_kernel_t *kernel, gradd_prepared_t *prepared);

#ifdef __cplusplus
}
#endif
#endif
