/* `gradd doctor`: reports what this machine offers the daemon, and what stands in its way. */
#ifndef GRADD_SERVER_CLI_DOCTOR_H
#define GRADD_SERVER_CLI_DOCTOR_H

#include <stdbool.h>
#include <stdio.h>

/* A line, or an object of JSON, per device of the build, per plug-in, and for the device that is
 * wanted ("" = none). Loads plug-ins. False: that one cannot be had. */
bool doctor(FILE *out, const char *wanted, bool json);

#endif
