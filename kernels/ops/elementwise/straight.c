/* com.gradd StraightThrough: y = value, with the gradient of x.
 *
 * The result of a write that autograd does not see (under torch.no_grad(), through detach()): the
 * elements are those of `value`, but the history stays that of `x`, so dx = dy and nothing reaches
 * `value`. Also known as the straight-through estimator (Bengio et al., 2013, arXiv:1308.3432). The
 * gradient is not the derivative on purpose: the cases compare values only,
 * tests/python/values/test_engine.py has the gradient.
 */
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/describe/cost.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"

static gradd_status_t compute_straight(const gradd_launch_t *r) {
    if (r->out[0].data == r->in[0].data) return GRADD_OK;
    gradd_copy_bytes(r->out[0].data, r->in[0].data, (size_t)gradd_type_bytes(&r->out[0].type));
    return GRADD_OK;
}

static gradd_status_t infer_straight(gradd_infer_t *c) {
    if (!gradd_type_equal(&c->in[0].type, &c->in[1].type)) {
        char a[GRADD_TYPE_TEXT], b[GRADD_TYPE_TEXT];
        return GRADD_FAIL(GRAPH, "value is %s and x is %s: they must be of one type",
                          gradd_type_format(&c->in[0].type, a),
                          gradd_type_format(&c->in[1].type, b));
    }
    c->out[0] = c->in[0].type;
    return GRADD_OK;
}

static gradd_status_t grad_straight(gradd_grad_t *g) {
    g->din[1] = g->dout[0];
    return GRADD_OK;
}

GRADD_OPS(straight, GRADD_OP("StraightThrough", "com.gradd", 1, (2, 2), (1, 1), .no_diff = 1,
                             .infer = infer_straight, .rowwise = gradd_rowwise_map,
                             .grad = grad_straight, .ref = GRADD_REF(compute_straight),
                             .cases = GRADD_CASES({.text = "f32[2,3] f32[2,3]", .grad_tol = -1},
                                                  {.text = "f32[] f32[]", .grad_tol = -1},
                                                  {.text = "f32[0,2] f32[0,2]", .grad_tol = -1})));

GRADD_KERNELS(cpu, straight,
              GRADD_KERNEL("StraightThrough", "loop", .inplace = 1, .compute = compute_straight,
                           .cost = gradd_cost_move));
