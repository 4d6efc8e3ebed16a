/* Packets with file descriptors over an AF_UNIX SOCK_SEQPACKET socket.
 *
 * One call moves one packet with at most GRADD_FD_MAX descriptors. Received descriptors are
 * close-on-exec and belong to the caller. A packet or a list of descriptors that does not fit is
 * refused as a whole: its descriptors are closed, never half delivered. No SIGPIPE is raised.
 * Works with blocking and non-blocking sockets; safe from any thread.
 */
#ifndef GRADD_SHM_FDPASS_H
#define GRADD_SHM_FDPASS_H

#include <stddef.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_FD_MAX 16

typedef enum gradd_fd_event_e {
    GRADD_FD_PACKET, /* a packet was received */
    GRADD_FD_AGAIN,  /* non-blocking socket, nothing there now */
    GRADD_FD_CLOSED, /* the peer closed its end: no packet will come */
} gradd_fd_event_t;

/* Sends one packet (bytes > 0) with n_fds descriptors, which stay open here. Fails with LIMIT when
 * the arguments are out of range or the peer does not read (non-blocking socket), IO otherwise. */
gradd_status_t gradd_fd_send(int socket, const void *data, size_t bytes, const int *fds, int n_fds);

/* Room for a packet, and the packet received. */
typedef struct gradd_fd_packet_s {
    void *data;
    size_t capacity;
    int *fds;
    int max_fds;
    size_t bytes; /* set on success; with AGAIN and CLOSED 0 */
    int n_fds;    /* likewise */
} gradd_fd_packet_t;

/* Receives one packet of at most `capacity` bytes and at most max_fds descriptors. Fails with LIMIT
 * (packet or descriptors too many, or more than this process may open: all of them closed; the
 * socket stays usable) or IO. An empty packet reads as CLOSED, so none is ever sent. */
gradd_status_t gradd_fd_recv(int socket, gradd_fd_packet_t *packet, gradd_fd_event_t *out_event);

#ifdef __cplusplus
}
#endif
#endif
