/* `gradd doctor`: what this machine offers the daemon, and what is in the way. */
#ifndef GRADD_SERVER_DOCTOR_H
#define GRADD_SERVER_DOCTOR_H

#include <stdio.h>

/* One line per device of the build and per plug-in. Loads plug-ins. */
void doctor(FILE *out);

#endif
