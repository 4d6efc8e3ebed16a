/* Parses the arguments of explain and estimate. See explain_args.h. */
#include "server/explain/explain_args.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/explain/estimate.h"
#include "server/explain/explain_report.h"

typedef enum flag_type_e {
    FLAG,
    NUMBER,
    THREADS,
    TEXT,
    GIB,
    SHARE,
    BYTES,
    BATCHES,
    SYMBOL
} flag_type_t;

typedef struct flag_s {
    const char *name;
    flag_type_t type;
    unsigned uses; /* of the commands that use it: bits of explain_use_t */
    size_t offset; /* of the field in explain_args_t */
} flag_t;

#define MOST      (1LL << 40)
#define OF_A_FILE (EXPLAIN_FILE | EXPLAIN_ESTIMATE)
#define ALWAYS    (OF_A_FILE | EXPLAIN_LIVE)

static const flag_t flags[] = {
    {"--train", TEXT, OF_A_FILE, offsetof(explain_args_t, train)},
    {"--out", TEXT, OF_A_FILE, offsetof(explain_args_t, out)},
    {"--grad", TEXT, OF_A_FILE, offsetof(explain_args_t, grad)},
    {"--onnx", TEXT, EXPLAIN_FILE, offsetof(explain_args_t, onnx)},
    {"--gradient", TEXT, EXPLAIN_FILE, offsetof(explain_args_t, gradient)},
    {"--dir", TEXT, EXPLAIN_LIVE, offsetof(explain_args_t, dir)},
    {"--optimizer", TEXT, EXPLAIN_ESTIMATE, offsetof(explain_args_t, optimizer)},
    {"--threads", THREADS, OF_A_FILE, offsetof(explain_args_t, threads)},
    {"--session", NUMBER, EXPLAIN_LIVE, offsetof(explain_args_t, session)},
    {"--plan", NUMBER, EXPLAIN_LIVE, offsetof(explain_args_t, plan)},
    {"--fits", GIB, EXPLAIN_ESTIMATE, offsetof(explain_args_t, fits_gib)},
    {"--memory-budget", BYTES, OF_A_FILE, offsetof(explain_args_t, memory_budget)},
    {"--recompute", TEXT, OF_A_FILE, offsetof(explain_args_t, recompute)},
    {"--labelled", SHARE, OF_A_FILE, offsetof(explain_args_t, labelled)},
    {"--real", SHARE, OF_A_FILE, offsetof(explain_args_t, real)},
    {"--curve", FLAG, EXPLAIN_ESTIMATE, offsetof(explain_args_t, curve)},
    {"--batch", BATCHES, EXPLAIN_ESTIMATE, 0},
    {"--dim", SYMBOL, OF_A_FILE, 0},
    {"--json", FLAG, ALWAYS, offsetof(explain_args_t, json)},
    {"--plain", FLAG, EXPLAIN_FILE, offsetof(explain_args_t, plain)},
    {"--list", FLAG, EXPLAIN_LIVE, offsetof(explain_args_t, list)},
    {"--accumulate", FLAG, EXPLAIN_ESTIMATE, offsetof(explain_args_t, accumulate)},
    {"--help", FLAG, ALWAYS, offsetof(explain_args_t, help)},
};

/* A number from `least` to `most`; *text moves behind it. */
static gradd_status_t read_number(const char *what, int least, int64_t most, const char **text,
                                  int64_t *out) {
    char *end = NULL;
    errno = 0;
    long long value = strtoll(*text, &end, 10);
    if (errno || end == *text || **text == '-' || **text == '+' || value < least || value > most)
        return GRADD_FAIL(LIMIT, "%s: expected a number from %d to %lld, got '%.60s'", what, least,
                          (long long)most, *text);
    *text = end;
    *out = value;
    return GRADD_OK;
}

static gradd_status_t read_shape(const char *word, explain_shape_t *out) {
    const char *equals = strrchr(word, '=');
    explain_shape_t shape = {.name = word};
    if (!equals || equals == word)
        return GRADD_FAIL(UNSUPPORTED,
                          "'%.120s': expected input=SIZExSIZE, such as input_ids=4x256", word);
    shape.n_name = (size_t)(equals - word);
    for (const char *at = equals + 1; *at;) { /* nothing behind = means rank 0 */
        if (shape.rank == GRADD_MAX_RANK)
            return GRADD_FAIL(LIMIT, "'%.120s': more than %d dimensions", word, GRADD_MAX_RANK);
        GRADD_TRY(read_number(word, 0, MOST, &at, &shape.dims[shape.rank++]));
        if (*at && (*at != 'x' || !at[1]))
            return GRADD_FAIL(UNSUPPORTED, "'%.120s': expected sizes with x between them", word);
        if (*at) at++;
    }
    *out = shape;
    return GRADD_OK;
}

static gradd_status_t add_shape(const char *word, explain_shape_t *list, int *n) {
    if (*n == EXPLAIN_MAX_SHAPES)
        return GRADD_FAIL(LIMIT, "more than %d shapes", EXPLAIN_MAX_SHAPES);
    GRADD_TRY(read_shape(word, &list[*n]));
    (*n)++;
    return GRADD_OK;
}

static gradd_status_t read_batches(const char *text, explain_args_t *args) {
    if (!*text) return GRADD_FAIL(UNSUPPORTED, "--batch: expected sizes from 1, such as 1,2,4");
    while (*text) {
        int64_t batch = 0;
        if (args->n_batches == EXPLAIN_MAX_BATCHES)
            return GRADD_FAIL(LIMIT, "--batch: more than %d sizes", EXPLAIN_MAX_BATCHES);
        GRADD_TRY(read_number("--batch", 1, MOST, &text, &batch));
        if (*text && *text != ',')
            return GRADD_FAIL(UNSUPPORTED, "--batch: expected sizes from 1, such as 1,2,4");
        args->batches[args->n_batches++] = batch;
        if (*text) text++;
    }
    return GRADD_OK;
}

/* "2GiB", "1.5 GiB", "512MiB", "64KiB", or a number of bytes. */
static gradd_status_t read_bytes(const char *what, const char *text, int64_t *out) {
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
    char *end;
    double value = strtod(text, &end);
    size_t unit = 0;
    const bool got = end != text && value > 0;
    while (*end == ' ')
        end++;
    while (unit < sizeof units / sizeof units[0] && strcmp(end, units[unit]))
        unit++;
    for (size_t i = 0; i < unit; i++)
        value *= 1024;
    if (!got || unit == sizeof units / sizeof units[0] || !(value >= 1 && value < 1e18))
        return GRADD_FAIL(LIMIT, "%s: expected bytes, as in 2GiB, 512MiB or 1048576, got '%.60s'",
                          what, text);
    *out = (int64_t)value;
    return GRADD_OK;
}

static gradd_status_t set_flag(const flag_t *flag, const char *value, explain_args_t *args) {
    char *field = (char *)args + flag->offset;
    switch (flag->type) {
    case FLAG:
        *(bool *)field = true;
        return GRADD_OK;
    case TEXT:
        memcpy(field, &value, sizeof value);
        return GRADD_OK;
    case NUMBER:
    case THREADS:
        GRADD_TRY(read_number(flag->name, 0, flag->type == THREADS ? GRADD_MAX_THREADS : MOST,
                              &value, (int64_t *)field));
        return *value ? GRADD_FAIL(LIMIT, "%s: expected a number", flag->name) : GRADD_OK;
    case GIB: {
        char *end;
        double gib = strtod(value, &end);
        if (*end || end == value || !(gib > 0) || gib > 1e9)
            return GRADD_FAIL(LIMIT, "%s: expected a number of GiB, got '%.60s'", flag->name,
                              value);
        *(double *)field = gib;
        return GRADD_OK;
    }
    case SHARE: {
        char *end;
        double share = strtod(value, &end);
        if (*end || end == value || !(share >= 0 && share <= 1))
            return GRADD_FAIL(LIMIT, "%s: expected a share of rows from 0 to 1, got '%.60s'",
                              flag->name, value);
        *(double *)field = share;
        return GRADD_OK;
    }
    case BYTES:
        return read_bytes(flag->name, value, (int64_t *)field);
    case BATCHES:
        return read_batches(value, args);
    case SYMBOL:
        GRADD_TRY(add_shape(value, args->symbols, &args->n_symbols));
        if (args->symbols[args->n_symbols - 1].rank != 1)
            return GRADD_FAIL(UNSUPPORTED, "--dim '%.120s': expected name=number", value);
        return GRADD_OK;
    }
    return GRADD_FAIL(INTERNAL, "a flag without a type");
}

static const flag_t *find_flag(const char *word, size_t n) {
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (strlen(flags[i].name) == n && !memcmp(flags[i].name, word, n)) return &flags[i];
    return NULL;
}

gradd_status_t explain_args_parse(int argc, char **argv, explain_args_t *out_args) {
    explain_args_t args = {
        .session = -1, .plan = -1, .dir = getenv("GRADD_DIR"), .labelled = -1, .real = -1};
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (word[0] != '-') {
            if (!args.model && !strchr(word, '='))
                args.model = word;
            else
                GRADD_TRY(add_shape(word, args.shapes, &args.n_shapes));
            continue;
        }
        const char *equals = strchr(word, '=');
        const flag_t *flag = find_flag(word, equals ? (size_t)(equals - word) : strlen(word));
        if (!flag) return GRADD_FAIL(UNSUPPORTED, "unknown option '%.120s'", word);
        const char *value = equals ? equals + 1 : NULL;
        if (flag->type != FLAG && !value && i + 1 < argc) value = argv[++i];
        if (flag->type != FLAG && !value)
            return GRADD_FAIL(UNSUPPORTED, "%s needs a value", flag->name);
        GRADD_TRY(set_flag(flag, value, &args));
        args.given |= 1u << (flag - flags);
    }
    *out_args = args;
    return GRADD_OK;
}

static const char *use_name(unsigned uses) {
    switch (uses) {
    case EXPLAIN_LIVE:
        return "gradd explain without a file";
    case EXPLAIN_FILE:
        return "gradd explain MODEL.onnx";
    case EXPLAIN_ESTIMATE:
        return "gradd estimate";
    default:
        return "gradd explain MODEL.onnx and gradd estimate";
    }
}

gradd_status_t explain_args_check(const explain_args_t *args, explain_use_t use) {
    if (use == EXPLAIN_LIVE && args->onnx)
        return GRADD_FAIL(UNSUPPORTED,
                          "--onnx needs a file: the daemon does not keep the bytes of a model; in "
                          "the trainer, model.gradd_explain().save_onnx(path) writes them");
    if (use == EXPLAIN_LIVE && args->n_shapes)
        return GRADD_FAIL(UNSUPPORTED, "sizes are for a model file: gradd explain MODEL.onnx ...");
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (args->given & 1u << i && !(flags[i].uses & use))
            return GRADD_FAIL(UNSUPPORTED, "%s is for %s, it has no effect on %s", flags[i].name,
                              use_name(flags[i].uses), use_name(use));
    if (use == EXPLAIN_FILE && args->grad && !args->train)
        return GRADD_FAIL(UNSUPPORTED, "--grad needs --train: without one there is no backward, "
                                       "at which gradients could arrive");
    if (use == EXPLAIN_FILE && args->gradient && !args->train)
        return GRADD_FAIL(UNSUPPORTED, "--gradient needs --train: it says of what");
    return GRADD_OK;
}

bool explain_next_name(const char **list, const char **out_name, size_t *out_bytes) {
    while (**list == ',')
        (*list)++;
    if (!**list) return false;
    *out_name = *list;
    *out_bytes = strcspn(*list, ",");
    *list += *out_bytes;
    return true;
}

static const char model_help[] =
    "  NAME=4x256         sizes of an input; its symbols have these values in other inputs, too\n"
    "  --dim NAME=4       size of a symbolic dimension\n"
    "  --train all|A,B    inputs whose gradient is wanted; all = every float input of fixed size\n"
    "  --out A,B          outputs wanted (default: the loss when training, else all)\n"
    "  --grad A           outputs whose gradient may arrive (default: the first wanted float)\n"
    "  --memory-budget 2GiB  the most that a run may take; the rest is computed again\n"
    "  --recompute POLICY none, layers or compromise, where no budget decides\n"
    "  --labelled 0.3     share of rows that have a label: the others are left out, as in a step\n"
    "  --real 0.5         share of rows that are no padding, likewise\n"
    "  --threads N        threads of the plan (default: as a daemon started here)\n"
    "  --json             one JSON object\n";

void explain_args_usage(FILE *out) {
    fprintf(
        out,
        "usage: gradd explain [--list] [--session N] [--plan N]   a plan of the running daemon\n"
        "       gradd explain MODEL.onnx NAME=SIZES... [options]  a plan made here\n\n%s"
        "  --plain            do not recognise patterns\n"
        "  --onnx FILE        write the model with notes on how each node is run\n"
        "  --gradient FILE    write forward and backward in ONNX's own operators\n"
        "  --dir DIR          of the daemon's sockets [GRADD_DIR]\n",
        model_help);
    fputs("\nof each row --json has (in brackets the table's heading)\n", out);
    explain_print_columns(out);
}

void estimate_args_usage(FILE *out) {
    fprintf(out,
            "usage: gradd estimate MODEL.onnx NAME=SIZES... [options]\n\n%s"
            "  --batch 1,2,4      first size of the named inputs, one column each\n"
            "  --fits GIB         the largest batch whose total fits\n"
            "  --curve            memory against time of every column (of a single one: always)\n"
            "  --optimizer NAME   one of%s; the first is the default\n"
            "  --accumulate       gradients of several backwards are added up\n",
            model_help, estimate_optimizers);
}
