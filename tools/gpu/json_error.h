/* What a probe says of a call that failed: a line of JSON, whatever the call's text holds. */
#ifndef GRADD_TOOLS_TOLD_H
#define GRADD_TOOLS_TOLD_H

#include <stdio.h>

/* Without the quotes around it. Text of the preprocessor or the linker: no bytes below the blank.
 */
static void told_text(const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar(*text);
    }
}

/* `reason` NULL: the status says all. */
static void told_failure(const char *call, int line, int status, const char *reason) {
    printf("{\"failed\": \"");
    told_text(call);
    printf("\", \"line\": %d, \"status\": %d", line, status);
    if (reason) printf(", \"reason\": \"");
    if (reason) told_text(reason);
    printf(reason ? "\"}\n" : "}\n");
}

#endif
