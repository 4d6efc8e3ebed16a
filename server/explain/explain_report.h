/* An explanation ready to be printed. Its contents are listed in columns.inc; printing is in
 * explain_text.c (a table) and explain_json.c.
 */
#ifndef GRADD_SERVER_EXPLAIN_EXPLAIN_REPORT_H
#define GRADD_SERVER_EXPLAIN_EXPLAIN_REPORT_H

#include <stdio.h>

#include "server/api/gradd.h"
#include "server/graph/arena.h"

typedef enum explain_form_e {
    EXPLAIN_INT,
    EXPLAIN_LAUNCH, /* an INT, "-" below 0 in the table */
    EXPLAIN_TEXT,
    EXPLAIN_PLACE, /* a TEXT; the table puts behind it what the row stands for */
    EXPLAIN_PHASE, /* true = backward */
    EXPLAIN_TYPE,  /* two values in JSON and on the wire: element type and sizes */
    EXPLAIN_BYTES,
    EXPLAIN_FLOPS,
    EXPLAIN_MS,
    EXPLAIN_FLAG,
} explain_form_t;

/* How a form is kept. */
#define EXPLAIN_C_INT    int
#define EXPLAIN_C_LAUNCH int
#define EXPLAIN_C_TEXT   const char *
#define EXPLAIN_C_PLACE  const char *
#define EXPLAIN_C_PHASE  bool
#define EXPLAIN_C_TYPE   gradd_type_t
#define EXPLAIN_C_BYTES  int64_t
#define EXPLAIN_C_FLOPS  double
#define EXPLAIN_C_MS     double
#define EXPLAIN_C_FLAG   bool

/* One row; texts belong to the report's arena or to the plan. */
typedef struct explain_line_s {
#define COLUMN(member, form, ...) EXPLAIN_C_##form member;
#include "server/explain/columns.inc"
#undef COLUMN
} explain_line_t;

typedef struct explain_column_s {
    const char *key;
    explain_form_t form;
    size_t offset; /* in an explain_line_t, or in an explain_report_t */
    const char *heading;
    int width;
    const char *note, *meaning;
} explain_column_t;

/* Both end with one that has no key. */
extern const explain_column_t explain_columns[], explain_totals[];

#define EXPLAIN_FATES 6

/* Nodes of one operator that met one fate. */
typedef struct explain_fate_s {
    gradd_fate_t fate;
    const char *op;
    int count;
} explain_fate_t;

typedef struct explain_report_s {
    arena_t *arena; /* Owned */
    const char *title;
#define TOTAL(member, form, meaning) EXPLAIN_C_##form member;
#include "server/explain/columns.inc"
#undef TOTAL
    explain_line_t *lines; /* Owned */
    int n_lines, cap_lines;
    explain_fate_t *fates; /* Owned; sorted by fate, then count */
    int n_fates, cap_fates;
    int32_t *nodes; /* in the arena; per node of the model its fate and its row; NULL = not known */
    int n_nodes;
} explain_report_t;

typedef struct explain_source_s {
    const char *(*of_node)(const void *context, int node); /* "" = not known */
    const void *context;
} explain_source_t;

/* From a plan; plan, model and the explanation may go afterwards. Fails with NOMEM. */
gradd_status_t explain_report_make(const gradd_plan_t *plan, const gradd_explain_t *explain,
                                   const explain_source_t *source, explain_report_t *out_report);
void explain_report_finish(explain_report_t *report); /* accepts a zeroed one */

/* The notes of a model on one of its nodes: a sentence for its doc string, and metadata. */
#define EXPLAIN_MAX_NOTES 12

typedef struct explain_notes_s {
    const char *sentence;
    const char *key[EXPLAIN_MAX_NOTES], *value[EXPLAIN_MAX_NOTES];
    int n;
} explain_notes_t;

/* In the report's arena. Fails with NOMEM. */
gradd_status_t explain_report_notes(const explain_report_t *report, int node,
                                    explain_notes_t *out_notes);

#define EXPLAIN_PLAIN 32
/* The value of a column that is no TYPE, unadorned. The text may be the value's own. */
const char *explain_plain(const explain_column_t *column, const void *base,
                          char buffer[EXPLAIN_PLAIN]);

void explain_print_text(FILE *out, const explain_report_t *report);
void explain_print_json(FILE *out, const explain_report_t *report);
/* A list with the notes of every node. */
void explain_print_notes(FILE *out, const explain_report_t *report);
/* "  key   meaning" of every column, for the help. */
void explain_print_columns(FILE *out);

/* "3.2 MiB" and "3.2 M" into a buffer of 24 bytes. */
const char *explain_amount(int64_t bytes, char buffer[24]);
const char *explain_number(double value, char buffer[24]);
/* A JSON string with its quotes. */
void explain_json_text(FILE *out, const char *text);

#endif
