/* The table of operators and their kernels, as text or JSON: `gradd --list-ops [--json]`,
 * docs/operators.md. */
#ifndef GRADD_SERVER_CLI_LIST_OPS_H
#define GRADD_SERVER_CLI_LIST_OPS_H

#include <stdbool.h>
#include <stdio.h>

/* Sorted by domain and name. JSON is an array of objects: name, domain, since, until (null = still
 * valid), inputs and outputs as [min, max], types (of each input, the last repeats), attributes,
 * gradient, from_model, family, kernels: objects with device, name and types, of which the first
 * that takes a node runs it. Write errors are left to the caller's ferror. */
void list_ops(FILE *out, bool json);

#endif
