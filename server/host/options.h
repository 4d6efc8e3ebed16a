/* Command line and environment of the `gradd` binary, derived from the rows of options.inc.
 *
 *     gradd COMMAND [NAME] [options]      gradd --list-ops [--json]
 */
#ifndef GRADD_SERVER_HOST_OPTIONS_H
#define GRADD_SERVER_HOST_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "shm/status.h"

#define OPTION_TYPE_FLAG bool
#define OPTION_TYPE_INT  int64_t
#define OPTION_TYPE_TEXT const char *
#define OPTION_TYPE_BOOL bool

typedef struct options_s {
    const char *command; /* Borrowed from argv; "" when none was given */
    const char *about;   /* Borrowed: of "--help", the command that it is about; NULL: all */
    uint64_t given;      /* Which rows the command line gives, a bit for each */
#define OPTION(field, type, ...) OPTION_TYPE_##type field;
#include "server/host/options.inc"
#undef OPTION
} options_t;

/* Reads environment, then arguments. Texts are borrowed from both. Fails with LIMIT (a number out
 * of range) or UNSUPPORTED (an unknown word), with a sentence for the user. A variable that cannot
 * be read fails only `serve`, which uses it. A request for help anywhere gives the command
 * "--help", whatever else is wrong. */
gradd_status_t options_parse(int argc, char **argv, options_t *out_options);
/* Fails with UNSUPPORTED where the command line gives an option that `command` does not read. */
/* Whether `serve` with these is a daemon on the CPU, of which no driver of a GPU is a part. */
bool options_on_host(const options_t *options);
gradd_status_t options_check(const options_t *options);
/* Prints what there is, or what one command does and reads. Fails with UNSUPPORTED if there is no
 * such command. */
gradd_status_t options_usage(FILE *out, const char *about);

#endif
