/* `gradd explain MODEL.onnx`: compiles in this process and prints. See explain.h. */
#include <string.h>

#include "server/explain/explain.h"
#include "server/explain/row_shares.h"

static const char *source_in_file(const void *file, int node) {
    return explain_file_source(file, node);
}

static gradd_status_t print_plan(const explain_args_t *args, const explain_file_t *file,
                                 const gradd_plan_t *plan) {
    explain_source_t source = {source_in_file, file};
    explain_report_t report = {0};
    gradd_explain_t *explain = NULL;
    GRADD_TRY(gradd_plan_explain(plan, &explain));
    gradd_status_t status = explain_report_make(plan, explain, &source, &report);
    /* First, so that nothing is printed where it cannot be written. */
    if (!status && args->onnx) status = explain_file_annotate(file, &report, args->onnx);
    if (!status) {
        const char *slash = strrchr(args->model, '/');
        report.title = slash ? slash + 1 : args->model;
        if (args->json)
            explain_print_json(stdout, &report);
        else
            explain_print_text(stdout, &report);
    }
    explain_report_finish(&report);
    gradd_explain_destroy(explain);
    return status;
}

gradd_status_t explain_model(const explain_args_t *args) {
    explain_file_t file = {0};
    explain_ask_t ask = {0};
    gradd_plan_t *plan = NULL;
    GRADD_TRY(explain_file_open(args->model, &file));
    explain_rows_t rows;
    gradd_status_t status = explain_file_plan(&file, args, 0, &ask, &rows, &plan);
    if (!status && args->gradient)
        status = explain_file_gradient(&file, &ask.options, args->gradient);
    if (!status) status = print_plan(args, &file, plan);
    gradd_plan_destroy(plan);
    explain_ask_finish(&ask);
    explain_file_finish(&file);
    return status;
}
