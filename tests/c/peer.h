/* A client of the daemon for tests and benchmarks, and the daemon as a child process.
 *
 * It speaks docs/protocol.md with as little help as possible, so that a test can also speak it
 * wrongly. Requests are built with server/wire/wire.h:
 *
 *     wire_out_t *m = peer_request(&peer, "bind");
 *     wire_key(m, "bind"); wire_put_u64(m, 1); ...
 *     CHECK_OK(peer_call(&peer));          // the reply's code becomes the status
 *     peer_number(&peer, "session");
 *
 * Functions named peer_* fail the test on transport errors.
 */
#ifndef GRADD_TESTS_C_PEER_H
#define GRADD_TESTS_C_PEER_H

#include <sys/types.h>
#include <zmq.h>

#include "server/wire/wire.h"
#include "shm/segment.h"

#define PEER_WAIT_MS 30000

/* ---- the daemon ---- */

typedef struct peer_daemon_s {
    char dir[64]; /* a fresh temporary directory, removed by peer_daemon_stop */
    pid_t pid;
} peer_daemon_t;

/* Starts `gradd serve --dir DIR` (extra: more arguments, NULL at the end, or NULL) and waits until
 * it listens. */
void peer_daemon_start(peer_daemon_t *daemon, const char *const *extra);
/* Starts it again in the same directory after it has ended. */
void peer_daemon_restart(peer_daemon_t *daemon);
/* Starts a second one in the same directory and returns its exit code. */
int peer_daemon_again(const peer_daemon_t *daemon);
/* Runs `gradd COMMAND --dir DIR`; returns the exit code, stdout in `output` (0-terminated). */
int peer_command(const peer_daemon_t *daemon, const char *command, char *output, size_t bytes);
/* SIGTERM; the daemon must end with exit code 0 within the limit and leave no socket. */
void peer_daemon_stop(peer_daemon_t *daemon);
/* Removes what an ended daemon has left in its directory, and the directory. */
void peer_daemon_clean(const peer_daemon_t *daemon);
/* Waits for its end; returns the exit code, or 128 + signal. */
int peer_daemon_wait(peer_daemon_t *daemon, int limit_ms);
/* Its process that computes, 0 while there is none. */
pid_t peer_daemon_worker(const peer_daemon_t *daemon);
/* Descriptors that the daemon has open, in both of its processes. */
int peer_daemon_fds(const peer_daemon_t *daemon);

/* ---- the client ---- */

typedef struct peer_s {
    char dir[64];
    int control;
    void *context, *dealer;
    uint8_t nonce[16], token[16];
    bool attached;
    bool reads_replaced; /* so it says in hello */
    uint64_t q;
    wire_out_t out;
    zmq_msg_t reply;
    uint8_t packet[65536];
    wire_doc_t doc; /* of the last reply */
    gradd_segment_t segment;
} peer_t;

/* Connects both sockets; nothing is said yet. */
void peer_connect(peer_t *peer, const char *dir);
/* hello with this range of versions; keeps the nonce. */
gradd_status_t peer_hello(peer_t *peer, int low, int high);
/* Makes a segment and sends it as `id`. */
gradd_status_t peer_segment(peer_t *peer, uint64_t id, uint64_t bytes);
/* Sends any descriptor as a segment. */
gradd_status_t peer_send_fd(peer_t *peer, uint64_t id, uint64_t bytes, int fd);
gradd_status_t peer_attach(peer_t *peer);
/* Waits until it has moved to the next worker, takes the new nonce, and connects a new dealer.
 * *out_dropped: a packet of its own has had no answer. */
void peer_moved(peer_t *peer, bool *out_dropped);
/* All of the above but peer_moved: segment 1 of `bytes`. */
void peer_open(peer_t *peer, const char *dir, uint64_t bytes);
void peer_close(peer_t *peer);

/* A control packet in place: peer_request's twin for the control socket; send with peer_control. */
gradd_status_t peer_control(peer_t *peer, int fd);

/* Begins a request with v, q (the next) and t. */
wire_out_t *peer_request(peer_t *peer, const char *verb);
/* Sends it with payload frames and waits for the reply. The reply's failure becomes the status and
 * the error message. */
gradd_status_t peer_call(peer_t *peer);
gradd_status_t peer_call_with(peer_t *peer, const void *frame, size_t bytes);
/* The halves of peer_call. */
void peer_send(peer_t *peer);
gradd_status_t peer_receive(peer_t *peer);
/* True when a reply arrives within ms. */
bool peer_pending(peer_t *peer, int ms);

int64_t peer_number(const peer_t *peer, const char *key);
const msgpack_object *peer_value(const peer_t *peer, const char *key);

/* Address in segment 1. */
void *peer_at(const peer_t *peer, uint64_t offset);

/* A tensor of f32 in segment 1; rank up to 2. */
typedef struct peer_f32_s {
    uint64_t offset;
    int rank;
    int64_t dims[2];
    int at; /* its position, where the field has 'at' */
} peer_f32_t;

/* The value of a field that is a list of n tensors; with_at: with their positions. */
void peer_put_tensors(wire_out_t *out, int n, const peer_f32_t *tensors, bool with_at);
/* Field and value; only one tensor, without 'at'. */
void peer_put_one(wire_out_t *out, const char *key, peer_f32_t tensor);

/* ---- models ---- */

/* y = x * w elementwise (x, w: f32[?, 4]), loss = ReduceSum(y): inputs x, w; outputs y, loss.
 * Puts it and plans it as `plan` for n rows: w bound and differentiated, x differentiated. */
gradd_status_t peer_plan_small(peer_t *peer, uint64_t plan, int64_t rows);
/* The same up to the request, which takes more fields and is sent with peer_call. */
wire_out_t *peer_ask_small(peer_t *peer, uint64_t plan, int64_t rows);
/* y = x @ w @ w @ ... (n_products times), all f32[n, n]; w bound, inference. */
gradd_status_t peer_plan_slow(peer_t *peer, uint64_t plan, int64_t n, int n_products);
/* forward of peer_plan_small with the layout below, as run `run`; binding 1 must be bound. */
void peer_forward_small(peer_t *peer, uint64_t plan, uint64_t run, int64_t rows);
/* Plan 1 for five rows, binding 1, and one forward as `run`; the loss. */
float peer_run_small(peer_t *peer, uint64_t run);

/* Offsets that the small model's helpers use in segment 1 (rows <= 64). */
enum {
    AT_X = 0,
    AT_W = 1024,
    AT_Y = 2048,
    AT_LOSS = 3072,
    AT_DLOSS = 3136,
    AT_DX = 4096,
    AT_DW = 5120,
    SMALL_BYTES = 8192,
};

#endif
