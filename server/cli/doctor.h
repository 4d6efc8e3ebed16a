/* `gradd doctor`: reports what this machine offers the daemon, and what stands in its way. */
#ifndef GRADD_SERVER_CLI_DOCTOR_H
#define GRADD_SERVER_CLI_DOCTOR_H

#include <stdbool.h>
#include <stdio.h>

/* A line, or an object of JSON, per device of the build, per plug-in, and for the device that is
 * wanted ("" = none); then what the kernel offers for confining daemons, and what is in force in
 * those that run in the directory (NULL: the user's). Loads plug-ins. False: the wanted device
 * cannot be had. */
bool doctor(FILE *out, const char *wanted, const char *dir, bool json);

#endif
