/* The commands `gradd explain` and `gradd estimate` of the binary.
 *
 * explain without a file asks the running daemon about one of its plans (verb `explain`); with one
 * it compiles in this process. estimate always compiles here. Nothing is run.
 */
#ifndef GRADD_SERVER_CLI_EXPLAIN_COMMAND_H
#define GRADD_SERVER_CLI_EXPLAIN_COMMAND_H

#include "server/explain/explain.h"
#include "server/host/rundir.h"

/* Prints a plan, or the list of plans, of the daemon that holds the lock of a directory. */
gradd_status_t explain_running(const explain_args_t *args, const rundir_t *dir);

/* Arguments behind the command; the process's exit code, as in main.c. */
int explain_main(int argc, char **argv);
int estimate_main(int argc, char **argv);

#endif
