/* Descriptors of this process, for tests that none is lost. */
#ifndef GRADD_TESTS_DESCRIPTORS_H
#define GRADD_TESTS_DESCRIPTORS_H

int open_descriptors(void);
/* The same, once `expected` are open or five seconds have gone: others close foreign ones. */
int settled_descriptors(int expected);

#endif
