/* Structure-aware mutation of ONNX models. See mutate_onnx.h.
 *
 * Decodes the input, changes one thing in the decoded message (an edge, a name, a number, an order)
 * and encodes it again, so that the result gets past the prescan and reaches the validation.
 * Changed pointers may leak or be shared: nothing is freed here, one arena is dropped at the end.
 */
#include "tests/fuzz/mutate_onnx.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/arena.h"
#include "server/graph/model.h"
#include "tests/c/onnx_build.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max_n);

static uint64_t state;

static size_t pick(size_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return n ? (size_t)(state >> 33) % n : 0;
}

static int64_t number(void) {
    static const int64_t odd[] = {0,  1,         -1,        2,         3,         8,         9,
                                  64, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1ll << 40, 20};
    return odd[pick(sizeof odd / sizeof odd[0])];
}

static char *or_empty(char *name) {
    return name ? name : "";
}

/* Some name that occurs in the graph, or an empty or unknown one; never NULL. */
static char *any_name(const Onnx__GraphProto *g) {
    switch (pick(6)) {
    case 0:
        return g->n_input ? or_empty(g->input[pick(g->n_input)]->name) : "x";
    case 1:
        return g->n_initializer ? or_empty(g->initializer[pick(g->n_initializer)]->name) : "w";
    case 2:
        return "";
    case 3:
        return "elsewhere";
    default:
        break;
    }
    if (!g->n_node) return "x";
    const Onnx__NodeProto *node = g->node[pick(g->n_node)];
    return node->n_output ? node->output[pick(node->n_output)] : "y";
}

static void mutate_tensor(Onnx__TensorProto *t) {
    switch (pick(5)) {
    case 0:
        t->data_type = (int32_t)pick(18);
        break;
    case 1:
        if (t->n_dims) t->dims[pick(t->n_dims)] = number();
        break;
    case 2:
        if (t->n_dims) t->n_dims--;
        break;
    case 3:
        t->has_data_location = 1;
        t->data_location = (int32_t)pick(3);
        break;
    default:
        if (t->raw_data.len) t->raw_data.len -= pick(t->raw_data.len + 1);
    }
}

/* Any operator of the table. */
static char *any_operator(void) {
    const gradd_ops_t *family = gradd_op_families[pick(gradd_op_family_count)];
    return (char *)family->v[pick(family->n)].name;
}

static void mutate_attr(Onnx__AttributeProto *a) {
    static char *const names[] = {"axis", "perm", "to", "value", "alpha", ""};
    switch (pick(5)) {
    case 0:
        a->type = (int32_t)pick(16);
        break;
    case 1:
        a->i = number();
        break;
    case 2:
        if (a->n_ints) a->ints[pick(a->n_ints)] = number();
        break;
    case 3:
        a->name = names[pick(sizeof names / sizeof names[0])];
        break;
    default:
        if (a->t) mutate_tensor(a->t);
    }
}

static void mutate_node(Onnx__GraphProto *g, Onnx__NodeProto *node) {
    static char *const ops[] = {"Concat", "Transpose", "Reshape",   "Slice",    "Split", "Identity",
                                "Cast",   "Add",       "SliceGrad", "NoSuchOp", "Pad",   ""};
    static char *const domains[] = {"", "ai.onnx", "com.gradd", "org.example"};
    switch (pick(6)) {
    case 0:
        if (node->n_input) node->input[pick(node->n_input)] = any_name(g);
        break;
    case 1:
        if (node->n_output) node->output[pick(node->n_output)] = any_name(g);
        break;
    case 2:
        node->op_type = pick(2) ? any_operator() : ops[pick(sizeof ops / sizeof ops[0])];
        break;
    case 3:
        node->domain = domains[pick(4)];
        break;
    case 4:
        if (node->n_input) node->n_input--;
        break;
    default:
        if (node->n_attribute) mutate_attr(node->attribute[pick(node->n_attribute)]);
    }
}

static void mutate_input(Onnx__GraphProto *g, Onnx__ValueInfoProto *info) {
    Onnx__TypeProto__Tensor *tensor = info->type ? info->type->tensor_type : NULL;
    switch (pick(4)) {
    case 0:
        info->name = any_name(g);
        break;
    case 1:
        if (tensor) tensor->elem_type = (int32_t)pick(18);
        break;
    case 2:
        if (tensor) tensor->shape = NULL;
        break;
    default:
        if (tensor && tensor->shape && tensor->shape->n_dim)
            tensor->shape->dim[pick(tensor->shape->n_dim)]->dim_value = number();
    }
}

static void mutate_model(Onnx__ModelProto *m) {
    Onnx__GraphProto *g = m->graph;
    if (!g) return;
    switch (pick(8)) {
    case 0:
        if (m->n_opset_import) m->opset_import[pick(m->n_opset_import)]->version = number();
        break;
    case 1:
        if (g->n_node > 1) { /* swap: order */
            size_t a = pick(g->n_node), b = pick(g->n_node);
            Onnx__NodeProto *node = g->node[a];
            g->node[a] = g->node[b];
            g->node[b] = node;
        }
        break;
    case 2:
        if (g->n_input) mutate_input(g, g->input[pick(g->n_input)]);
        break;
    case 3:
        if (g->n_output) g->output[pick(g->n_output)]->name = any_name(g);
        break;
    case 4:
        if (g->n_initializer) mutate_tensor(g->initializer[pick(g->n_initializer)]);
        break;
    default:
        if (g->n_node) mutate_node(g, g->node[pick(g->n_node)]);
    }
}

static void *take(void *arena, size_t n) {
    return arena_alloc(arena, n);
}

static void drop(void *arena, void *p) {
    (void)arena;
    (void)p;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max_n, unsigned seed) {
    state = seed;
    size_t heap;
    arena_t *arena;
    if (pick(2) || model_prescan(data, n, NULL, &heap) || arena_create(0, &arena))
        return LLVMFuzzerMutate(data, n, max_n);
    ProtobufCAllocator allocator = {take, drop, arena};
    Onnx__ModelProto *m = onnx__model_proto__unpack(&allocator, n, data);
    size_t packed = 0;
    if (m) {
        for (size_t i = 0; i <= pick(3); i++)
            mutate_model(m);
        packed = onnx__model_proto__get_packed_size(m);
        if (packed <= max_n) onnx__model_proto__pack(m, data);
    }
    arena_destroy(arena);
    return packed && packed <= max_n ? packed : LLVMFuzzerMutate(data, n, max_n);
}

/* ---- seeds ---- */

static Onnx__ModelProto *chain(void) {
    Onnx__ModelProto *m = build_model();
    build_input(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(-1, 3));
    build_attr_int(build_node(m, "Concat", "join", "x,x", "c"), "axis", 0);
    build_attr_ints(build_node(m, "Transpose", "turn", "c", "y"), "perm", 2, BUILD_DIMS(1, 0));
    build_output(m, "y");
    return m;
}

static Onnx__ModelProto *constants(void) {
    Onnx__ModelProto *m = chain();
    build_opset(m, "com.gradd", 1);
    build_raw(build_init(m, "w", GRADD_DT_F32, 2, BUILD_DIMS(1, 2)), "12345678", 8);
    build_raw(build_init(m, "x", GRADD_DT_F32, 2, BUILD_DIMS(1, 3)), "123456789012", 12);
    Onnx__TensorProto *t = build_init(m, "shape", GRADD_DT_I64, 1, BUILD_DIMS(2));
    t->n_int64_data = 2;
    t->int64_data = build_copy(BUILD_DIMS(-1, 2), 16);
    t = build_init(m, "flag", GRADD_DT_BOOL, 0, NULL);
    t->n_int32_data = 1;
    t->int32_data = build_copy((int32_t[]){1}, 4);
    build_node(m, "Reshape", "", "y,shape", "r");
    build_node(m, "Slice", "", "r,shape,shape,,shape", "s");
    build_output(m, "s");
    return m;
}

static Onnx__ModelProto *attributes(void) {
    Onnx__ModelProto *m = chain();
    build_opset(m, "org.example", 7);
    Onnx__NodeProto *odd = build_node(m, "NoSuchOp", "odd", "y,,x", "a,,b");
    Onnx__AttributeProto *a = build_attr(odd, "alpha", BUILD_KIND(FLOAT));
    a->has_f = 1;
    a = build_attr(odd, "mode", BUILD_KIND(STRING));
    a->has_s = 1;
    a->s = (ProtobufCBinaryData){4, (uint8_t *)"tanh"};
    a = build_attr(odd, "value", BUILD_KIND(TENSOR));
    a->t = build_tensor("", GRADD_DT_U8, 1, BUILD_DIMS(2));
    build_raw(a->t, "ab", 2);
    a = build_attr(odd, "list", BUILD_KIND(FLOATS));
    a->n_floats = 1;
    a->floats = build_copy((float[]){1}, 4);
    return m;
}

static Onnx__ModelProto *nested(void) {
    Onnx__ModelProto *m = chain();
    Onnx__NodeProto *branch = build_node(m, "If", "branch", "y", "o");
    build_attr(branch, "then_branch", BUILD_KIND(GRAPH))->g = chain()->graph;
    return m;
}

Onnx__ModelProto *mutate_seed(int index) {
    Onnx__ModelProto *(*const seeds[MUTATE_SEEDS])(void) = {chain, constants, attributes, nested};
    return seeds[index]();
}
