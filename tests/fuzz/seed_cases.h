/* Seeds for fuzz_import: a model of one node for every case of every operator's row. */
#ifndef GRADD_TESTS_FUZZ_SEED_CASES_H
#define GRADD_TESTS_FUZZ_SEED_CASES_H

/* Writes the files <folder>/case_<n>; returns how many. */
int seed_cases(const char *folder);

#endif
