/* The control socket: hello and descriptors.
 *
 * AF_UNIX SOCK_SEQPACKET, one msgpack map per packet. ZeroMQ carries no descriptors, so segments
 * come this way, and a segment is acknowledged here before a command may name it. The owner has the
 * client's connection and hands its packets on (server/owner). Runs in the I/O thread, where no
 * call blocks: what takes long is left to the engine thread.
 */
#ifndef GRADD_SERVER_DAEMON_CONTROL_H
#define GRADD_SERVER_DAEMON_CONTROL_H

#include <stdbool.h>
#include <sys/types.h>

#include "server/device/device.h"
#include "server/verbs/commands.h"

#define CONTROL_MAX_PACKET (64 << 10)

/* The facts about the daemon that the control socket reports. Borrowed. */
typedef struct control_host_s {
    const char *dir;
    pid_t owner;
    const char *device;           /* name of the only one */
    const char *uuid;             /* its driver's name for it; NULL = there is none */
    const gradd_mapper_t *mapper; /* takes segments to it; may be NULL */
    /* For hello: */
    const quotas_t *quotas;
    const session_table_t *table;
    queue_t *queue;
} control_host_t;

control_host_t control_host(const char *dir, pid_t owner, gradd_device_t *device);

/* Answers the packets that wait, at most a few per call. *out_open is false when the peer has
 * closed the connection or does not read its replies; then the session must end.
 *
 * *out_request is NULL, or a request for the engine thread: where there is a mapper, it maps and
 * unmaps, which takes a tenth of a second for half a gigabyte. No other packet of the session may
 * be read before control_reply(). */
void control_read(session_t *session, const control_host_t *host, bool *out_open,
                  request_t **out_request);
/* Sends the reply to such a request; false as for *out_open. */
bool control_reply(const request_t *request);

#endif
