/* The tables of operators and of the CPU's kernels: no row lacks what the engine relies on. */
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "tests/c/eager.h"
#include "tests/test.h"

#include <string.h>

static gradd_status_t audit_row(const gradd_op_t *op) {
    const char *missing = NULL;
    if (!op->name || !op->domain || op->since < 1) return GRADD_FAIL(INTERNAL, "row without name");
    if (!op->infer) missing = "infer";
    const bool composite = gradd_op_is_composite(op);
    if (!op->ref && !composite) missing = "ref, or expand alone";
    if (!op->grad && !(op->flags & GRADD_OP_NO_GRAD) && !composite)
        missing = "grad or GRADD_OP_NO_GRAD";
    if (!op->cases || !op->cases[0].text) missing = "cases";
    if (op->max_out < 1 || op->max_in < op->min_in || op->max_out < op->min_out) missing = "arity";
    if (op->max_in > GRADD_OP_MAX_IN || op->max_out > GRADD_OP_MAX_OUT) missing = "valid arity";
    if (missing) return GRADD_FAIL(INTERNAL, "operator %s has no %s", op->name, missing);
    return GRADD_OK;
}

static gradd_status_t audit_ops(void) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++)
            GRADD_TRY(audit_row(&gradd_op_families[f]->v[i]));
    return GRADD_OK;
}

static const gradd_op_t *find_in(const gradd_ops_t *family, const char *name) {
    for (size_t i = 0; i < family->n; i++)
        if (!strcmp(family->v[i].name, name)) return &family->v[i];
    return NULL;
}

static gradd_status_t audit_family(const gradd_kernels_t *kernels) {
    const gradd_ops_t *ops = NULL;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        if (!strcmp(gradd_op_families[f]->file, kernels->file)) ops = gradd_op_families[f];
    if (!ops) return GRADD_FAIL(INTERNAL, "kernels of %s, which is no family", kernels->file);
    for (size_t i = 0; i < kernels->n; i++) {
        const gradd_kernel_t *k = &kernels->v[i];
        if (!k->op || !find_in(ops, k->op))
            return GRADD_FAIL(INTERNAL, "a kernel of %s runs '%s', which is not of that family",
                              kernels->file, k->op ? k->op : "");
        if (!k->name || !k->compute || (k->unprepare && !k->prepare) ||
            (k->prepare && k->workspace))
            return GRADD_FAIL(INTERNAL, "the kernel '%s' of %s is incomplete",
                              k->name ? k->name : "", k->op);
    }
    return GRADD_OK;
}

/* Passes make it where the device has a kernel of its own for what are two operators elsewhere. */
static bool is_for_others(const gradd_op_t *op) {
    return op->flags & GRADD_OP_INTERNAL && op->expand && op->ref;
}

/* Every kernel row is complete and runs an operator of its family; every operator but composites
 * and those for other devices has a kernel. */
static gradd_status_t audit_kernels(const gradd_backend_t *backend) {
    for (size_t f = 0; f < backend->n_kernels; f++)
        GRADD_TRY(audit_family(backend->kernels[f]));
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const char *name = gradd_op_families[f]->v[i].name;
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            bool found = gradd_op_is_composite(op) || is_for_others(op);
            for (size_t k = 0; k < backend->n_kernels && !found; k++)
                for (size_t j = 0; j < backend->kernels[k]->n && !found; j++)
                    found = !strcmp(backend->kernels[k]->v[j].op, name);
            if (!found)
                return GRADD_FAIL(INTERNAL, "operator %s has no kernel on the device '%s'", name,
                                  backend->name);
        }
    return GRADD_OK;
}

TEST(every_row_is_complete) {
    CHECK_OK(audit_ops());
    CHECK_OK(audit_kernels(&gradd_backend_cpu));
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            CHECK(gradd_op_by_name(op->name) != NULL);
            CHECK(gradd_op_find(op->domain, op->name, eager_opset(op)) != NULL);
        }
}
