/* The bits of operators' results, for a comparison between machines: reads test cases (see
 * kernels/cases/cases.h), one a line, `name domain opset text` with tabs between, and writes a line
 * for each: a hash of its outputs, or what failed. Every NaN counts as the same. One thread. With
 * an argument it writes the cases of all operators instead, in that form.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cases/case_export.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/registry.h"
#include "kernels/cpu/half.h"

/* FNV-1a, of 64 bits */
static uint64_t add(uint64_t hash, const void *data, size_t n) {
    const unsigned char *at = data;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u;
    return hash;
}

static bool is_nan(gradd_dtype_t dtype, const void *at) {
    if (dtype == GRADD_DT_F64) return isnan(*(const double *)at);
    if (dtype == GRADD_DT_F32) return isnan(*(const float *)at);
    return gradd_dtype_is_half(dtype) && isnan(gradd_half_f32(at, dtype));
}

static uint64_t add_view(uint64_t hash, const gradd_view_t *view) {
    const gradd_dtype_t dtype = view->type.dtype;
    const size_t each = dtype ? gradd_dtype_bytes(dtype) : 0;
    for (int64_t i = 0, n = dtype ? gradd_type_count(&view->type) : 0; i < n; i++) {
        const char *at = (const char *)view->data + (size_t)i * each;
        hash = is_nan(dtype, at) ? add(hash, "nan", 3) : add(hash, at, each);
    }
    return hash;
}

static gradd_status_t run(const char *domain, const char *name, int opset, const char *text,
                          uint64_t *out_hash) {
    const gradd_op_t *op = gradd_op_find(domain, name, opset);
    gradd_view_t out[GRADD_OP_MAX_OUT] = {0};
    gradd_case_data_t data;
    if (!op) return GRADD_FAIL(UNSUPPORTED, "operator %s of opset %d", name, opset);
    GRADD_TRY(gradd_case_parse(text, GRADD_DT_NONE, 42, &data));
    const gradd_status_t status = gradd_case_compute(op, &data, out);
    *out_hash = 0xcbf29ce484222325u;
    for (int j = 0; !status && j < data.n_out; j++)
        *out_hash = add_view(*out_hash, &out[j]);
    gradd_case_free(&data);
    return status;
}

static void list_cases(void) {
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++) {
            const gradd_op_t *op = &gradd_op_families[f]->v[i];
            for (const gradd_case_t *spec = op->cases; spec && spec->text; spec++)
                printf("%s\t%s\t%d\t%s\n", op->name, op->domain, op->since, spec->text);
        }
}

int main(int argc, char **argv) {
    static char line[4096];
    (void)argv;
    if (argc > 1) {
        list_cases();
        return 0;
    }
    /* by lines: if the program dies, it is of the case after the last one */
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    gradd_cpu_enter(1);
    while (fgets(line, sizeof line, stdin)) {
        char *rest = line, *part[4];
        uint64_t hash;
        for (int i = 0; i < 4; i++)
            if (!(part[i] = strsep(&rest, i < 3 ? "\t" : "\n"))) return 2;
        const gradd_status_t status = run(part[1], part[0], atoi(part[2]), part[3], &hash);
        if (status)
            printf("%s\n", gradd_error_message());
        else
            printf("%016" PRIx64 "\n", hash);
    }
    return 0;
}
