/* The connections of cmd.sock: what each of them may take.
 *
 * libzmq keeps the frames of a message until the last one has come, however many there are, from
 * peers that are no session as well; and it has no call that ends a connection. So the daemon has a
 * recv() of its own, as it has an accept4() (accept_budget.h), which libzmq's calls reach. It
 * follows the frames that come by (ZMTP 3, RFC 23: it reads their heads, changes nothing), and ends
 * a connection, as if the peer had closed it, whose message has more frames, or whose messages take
 * more bytes, than any client sends. Those that are no session are ended when they have been silent
 * for long. Any thread.
 */
#ifndef GRADD_SERVER_HOST_CONNECTIONS_H
#define GRADD_SERVER_HOST_CONNECTIONS_H

#include <stdbool.h>
#include <stdint.h>

#define CONNECTIONS_OF_PROCESS 96    /* the sessions that it may have, and half as many */
#define CONNECTIONS_FRAMES     65536 /* of a message: more than 8 are refused by name */
/* Bytes of one connection that libzmq holds, 64 more for each frame; the same of all. */
#define CONNECTIONS_WAITING   (256u << 20)
#define CONNECTIONS_ALL       (1u << 30)
#define CONNECTIONS_SILENT_MS 30000

/* A connection that was accepted just now; false: it is to be refused. */
bool connections_add(int fd);
/* A message of so many bytes and frames has been taken from libzmq. */
void connections_taken(int fd, uint64_t bytes, int n_frames);
/* It is a session's from here on. Returns its number, 0 = it has none. */
uint64_t connections_keep(int fd);
/* Whether the connection of that number is open; one without a number is. */
bool connections_live(int fd, uint64_t number);
/* Ends those that are no session and have been silent for too long. */
void connections_expire(int64_t now_ms);
/* So many ms have passed in which this process did not run: they count against no connection. */
void connections_forgive(int64_t ms);

/* ---- for tests: the frames of one connection, without a socket ---- */

typedef struct frames_s {
    uint8_t head[9];
    int n_head;
    uint64_t body;    /* bytes of the frame, or greeting, that are still to come */
    int n_frames;     /* of the message that is not complete */
    uint64_t waiting; /* bytes of what has come */
} frames_t;

/* A connection that begins. */
frames_t frames_begin(void);
/* Bytes that have come. False if a message has too many frames. */
bool frames_read(frames_t *frames, const void *data, uint64_t bytes);

#endif
