/* Which build this process runs: the id that the linker makes from the content of the binary.
 *
 * The version stays the same while a developer changes and rebuilds gradd; the build id does not.
 * hello reports it, so that a client can see that the daemon is older than the binary that it would
 * start itself.
 */
#ifndef GRADD_SERVER_DAEMON_BUILD_H
#define GRADD_SERVER_DAEMON_BUILD_H

/* Hexadecimal digits; "" if the program was linked without an id. I/O thread. */
const char *build_id(void);

#endif
