/* Parses the command line. The rows of options.inc are the only list of options. */
#include "server/host/options.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/api/gradd.h"

typedef enum option_type_e { FLAG, INT, BOOL, TEXT } option_type_t;

typedef struct option_row_s {
    option_type_t type;
    size_t offset; /* of the field in options_t */
    int64_t most;  /* of an INT */
    const char *flag, *env, *commands, *help;
} option_row_t;

static const option_row_t rows[] = {
#define OPTION(field, type, start, ...) {type, offsetof(options_t, field), __VA_ARGS__},
#include "server/host/options.inc"
#undef OPTION
};
#define N_ROWS (sizeof rows / sizeof *rows)
_Static_assert(N_ROWS <= 64, "options_t has a bit for each");

static const struct {
    const char *name, *help;
    const char *operand; /* that may follow it, into the option --name; NULL: none */
} verbs[] = {
    {"serve",      "run the daemon (exit code 4: one runs already)",                        NULL    },
    {"ps",         "the daemon and its sessions",                                           NULL    },
    {"top",        "the same, again and again",                                             NULL    },
    {"show",       "one session in full: its number, its process, or its name",             "NAME"  },
    {"logs",       "what the daemon has logged, of all or of one session",                  "[NAME]"},
    {"drain",      "begin no request, until --end: sessions and their memory stay",         NULL    },
    {"quota",      "share, memory and number of sessions by name: shows them, or sets one", "[NAME]"},
    {"web",        "metrics for Prometheus and a page in the browser, until Ctrl-C",        NULL    },
    {"stop",       "end the daemon after the request in progress",                          NULL    },
    {"restart",    "put a new version under running trainers",                              NULL    },
    {"forget",     "end a session that has outlived its process",                           "NAME"  },
    {"trace",      "the last requests of the daemon, as a file for Perfetto",               NULL    },
    {"explain",    "the operators of a plan, of the daemon or of a file (explain --help)",  NULL    },
    {"estimate",   "planned memory of training a model (estimate --help)",                  NULL    },
    {"version",    "version of binary and protocol",                                        NULL    },
    {"doctor",     "the devices, and why others are not available",                         NULL    },
    {"cache",      "the translated graphs that trainers keep on disk",                      NULL    },
    {"demo",       "train a small Llama (of the wheels; in a clone: make demo)",            NULL    },
    {"artifacts",  "files for training on devices (of the wheels, as demo is)",             NULL    },
    {"--list-ops", "operators of the engine",                                               NULL    },
};
#define N_VERBS (sizeof verbs / sizeof *verbs)

static gradd_status_t set_bool(const char *name, const char *text, bool *out) {
    static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp(text, words[i]) != 0) continue;
        *out = i % 2;
        return GRADD_OK;
    }
    return GRADD_FAIL(UNSUPPORTED,
                      "%s: expected one of 1, 0, true, false, yes, no, on, off, got '%.60s'", name,
                      text);
}

static gradd_status_t set_value(const option_row_t *row, const char *name, const char *text,
                                options_t *options) {
    char *field = (char *)options + row->offset;
    if (row->type == TEXT) {
        memcpy(field, &text, sizeof text);
        return GRADD_OK;
    }
    if (row->type == BOOL || row->type == FLAG) return set_bool(name, text, (bool *)field);
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < 0 || value > row->most)
        return GRADD_FAIL(LIMIT, "%s: expected a number from 0 to %lld, got '%s'", name,
                          (long long)row->most, text);
    int64_t number = value;
    memcpy(field, &number, sizeof number);
    return GRADD_OK;
}

static const option_row_t *find_row(const char *word, size_t n) {
    for (size_t i = 0; i < N_ROWS; i++)
        if (strlen(rows[i].flag) == n && memcmp(rows[i].flag, word, n) == 0) return &rows[i];
    return NULL;
}

/* "ps --help" and "help ps" are the same. */
static bool asks_for_help(int argc, char **argv, options_t *options) {
    const bool verb = argc > 1 && strcmp(argv[1], "help") == 0;
    bool asks = verb;
    for (int i = 1; i < argc; i++)
        asks = asks || strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
    if (!asks) return false;
    options->command = "--help";
    const char *word = argv[verb ? 2 : 1]; /* NULL behind the last one */
    if (word && word[0] != '-') options->about = word;
    return true;
}

static int find_verb(const char *name) {
    for (size_t i = 0; i < N_VERBS; i++)
        if (strcmp(verbs[i].name, name) == 0) return (int)i;
    return -1;
}

static gradd_status_t take_word(const char *word, options_t *options) {
    if (!options->command[0]) {
        options->command = word;
        return GRADD_OK;
    }
    const int verb = find_verb(options->command);
    if (verb < 0 || !verbs[verb].operand)
        return GRADD_FAIL(UNSUPPORTED, "'%s' after '%s': one command at a time", word,
                          options->command);
    if (options->name)
        return GRADD_FAIL(UNSUPPORTED, "%s: '%s' and '%s': one name at a time", options->command,
                          options->name, word);
    options->name = word;
    return GRADD_OK;
}

gradd_status_t options_parse(int argc, char **argv, options_t *out_options) {
    options_t options = {
        .command = "",
#define OPTION(field, type, start, ...) .field = start,
#include "server/host/options.inc"
#undef OPTION
    };
    gradd_status_t environment = GRADD_OK;
    if (asks_for_help(argc, argv, &options)) {
        *out_options = options;
        return GRADD_OK;
    }
    for (size_t i = 0; i < N_ROWS; i++) {
        const char *value = rows[i].env[0] ? getenv(rows[i].env) : NULL;
        if (value && value[0] && !environment)
            environment = set_value(&rows[i], rows[i].env, value, &options);
    }
    bool only_words = false; /* behind "--" */
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (!only_words && strcmp(word, "--") == 0) {
            only_words = true;
            continue;
        }
        if (only_words || word[0] != '-' || strcmp(word, "--list-ops") == 0 ||
            strcmp(word, "--version") == 0) {
            GRADD_TRY(take_word(word, &options));
            continue;
        }
        const char *equals = strchr(word, '=');
        size_t n = equals ? (size_t)(equals - word) : strlen(word);
        const option_row_t *row = find_row(word, n);
        if (!row)
            return GRADD_FAIL(UNSUPPORTED, "unknown option '%s' (gradd --help lists them)", word);
        options.given |= UINT64_C(1) << (row - rows);
        if (row->type == FLAG) {
            *((bool *)((char *)&options + row->offset)) = true;
            continue;
        }
        const char *value = equals ? equals + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value) return GRADD_FAIL(UNSUPPORTED, "%s needs a value", row->flag);
        GRADD_TRY(set_value(row, row->flag, value, &options));
    }
    if (strcmp(options.command, "serve") == 0) GRADD_TRY(environment);
    *out_options = options;
    return GRADD_OK;
}

/* --version is another word for version. */
static bool is_read_by(const option_row_t *row, const char *command) {
    const char *name = strcmp(command, "--version") ? command : "version";
    const size_t n = strlen(name);
    for (const char *at = row->commands; *at; at += strspn(at, ", ")) {
        const size_t length = strcspn(at, ",");
        if (length == n && memcmp(at, name, n) == 0) return true;
        at += length;
    }
    return false;
}

gradd_status_t options_check(const options_t *options) {
    for (size_t i = 0; i < N_ROWS; i++)
        if (options->given & UINT64_C(1) << i && !is_read_by(&rows[i], options->command))
            return GRADD_FAIL(UNSUPPORTED, "%s is for %s; it has no effect on %s", rows[i].flag,
                              rows[i].commands, options->command);
    return GRADD_OK;
}

bool options_on_host(const options_t *options) {
    return !options->device || !options->device[0] || !strcmp(options->device, "cpu");
}

static void print_option(FILE *out, const option_row_t *row, bool of_all) {
    fprintf(out, "  %-14s ", row->flag);
    if (of_all) fprintf(out, "%s: ", row->commands);
    fputs(row->help, out);
    if (row->env[0]) fprintf(out, " [%s]", row->env);
    fputc('\n', out);
}

static void usage_of_all(FILE *out) {
    fputs("usage: gradd COMMAND [options]\n\n", out);
    for (size_t i = 0; i < N_VERBS; i++)
        fprintf(out, "  %-11s %s\n", verbs[i].name, verbs[i].help);
    fputs("\noptions\n", out);
    for (size_t i = 0; i < N_ROWS; i++)
        print_option(out, &rows[i], true);
}

gradd_status_t options_usage(FILE *out, const char *about) {
    size_t n_options = 0;
    if (!about) return usage_of_all(out), GRADD_OK;
    const int i = find_verb(about);
    if (i < 0)
        return GRADD_FAIL(UNSUPPORTED, "unknown command '%s' (gradd --help lists them)", about);
    fprintf(out, "usage: gradd %s%s%s [options]\n\n  %s\n", about, verbs[i].operand ? " " : "",
            verbs[i].operand ? verbs[i].operand : "", verbs[i].help);
    for (size_t k = 0; k < N_ROWS; k++) {
        if (!is_read_by(&rows[k], about)) continue;
        if (n_options++ == 0) fputs("\noptions\n", out);
        print_option(out, &rows[k], false);
    }
    return GRADD_OK;
}
