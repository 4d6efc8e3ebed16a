/* Version of the daemon and its engine, and of the protocol: one place, shown by hello, attach, ps
 * and `gradd version`.
 */
#ifndef GRADD_SERVER_WIRE_VERSION_H
#define GRADD_SERVER_WIRE_VERSION_H

#define GRADD_VERSION "0.1.0"

/* docs/protocol.md says what is in them. */
#define PROTOCOL_LOWEST  2
#define PROTOCOL_HIGHEST 2

#endif
