/* The commands `gradd explain` and `gradd estimate` of the binary.
 *
 * explain without a file asks the running daemon about one of its plans (verb `explain`); with one
 * it compiles in this process. estimate always compiles here. Nothing is run.
 */
#ifndef GRADD_SERVER_CLI_EXPLAIN_COMMAND_H
#define GRADD_SERVER_CLI_EXPLAIN_COMMAND_H

#include "server/explain/explain.h"

/* Prints a plan of the daemon, or the list of its plans. *out_running is false when no daemon runs.
 */
gradd_status_t explain_running(const explain_args_t *args, bool *out_running);

/* Arguments behind the command; the process's exit code, as in main.c. */
int explain_main(int argc, char **argv);
int estimate_main(int argc, char **argv);

#endif
