/* See connections.h. */
#include "server/host/connections.h"

#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "server/host/log.h"

#define MOST        4096 /* descriptors with a higher number are refused */
#define GREETING    64   /* bytes, before the first frame */
#define FRAME_BYTES 64   /* that libzmq takes for a frame, beside its body */

enum { MORE = 1, LONG = 2, COMMAND = 4 }; /* flags of a frame */

typedef struct connection_s {
    bool used, kept, ended;
    uint64_t serial; /* of this connection alone */
    ino_t inode;
    pid_t pid;
    int64_t heard_ms;
    uint64_t n_bytes, n_messages; /* that have come, and that were taken from libzmq */
    frames_t frames;
} connection_t;

static connection_t table[MOST];
static int highest; /* descriptor, and 1 more */
static uint64_t waiting, serials;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- frames ---- */

frames_t frames_begin(void) {
    return (frames_t){.body = GREETING};
}

static uint64_t length_of(const uint8_t *head) {
    uint64_t length = 0;
    if (!(head[0] & LONG)) return head[1];
    for (int i = 1; i < 9; i++)
        length = length << 8 | head[i];
    return length;
}

static void begin_frame(frames_t *frames) {
    frames->body = length_of(frames->head);
    frames->n_head = 0;
    if (frames->head[0] & COMMAND) return;
    /* A length is a claim: what libzmq does not take, it answers by closing. */
    frames->waiting += frames->body < CONNECTIONS_ALL ? frames->body + FRAME_BYTES : FRAME_BYTES;
    frames->n_frames++;
}

bool frames_read(frames_t *frames, const void *data, uint64_t bytes) {
    const uint8_t *at = data, *end = at + bytes;
    while (at < end) {
        if (frames->body > 0) {
            const uint64_t n =
                frames->body < (uint64_t)(end - at) ? frames->body : (uint64_t)(end - at);
            frames->body -= n;
            at += n;
            continue;
        }
        frames->head[frames->n_head++] = *at++;
        if (frames->n_head < (frames->head[0] & LONG ? 9 : 2)) continue;
        begin_frame(frames);
        if (frames->n_frames > CONNECTIONS_FRAMES) return false;
        if (!(frames->head[0] & (MORE | COMMAND))) frames->n_frames = 0;
    }
    return true;
}

/* ---- the table, under the lock ---- */

/* Whether the descriptor is still that connection: libzmq closes it without a word. */
static bool is_same(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_ino == table[fd].inode;
}

static void forget(int fd) {
    waiting -= table[fd].frames.waiting;
    table[fd] = (connection_t){0};
}

static bool has_many(pid_t pid) {
    int n = 0;
    for (int fd = 0; fd < highest; fd++) {
        if (!table[fd].used || table[fd].pid != pid) continue;
        if (is_same(fd))
            n++;
        else
            forget(fd);
    }
    return n >= CONNECTIONS_OF_PROCESS;
}

/* With what tells a peer that said nothing from one that was not heard: what it has sent, what of
 * that lies in the socket, and what in libzmq. */
static void end(int fd, const char *reason) {
    connection_t *c = &table[fd];
    int unread = 0;
    c->ended = true;
    ioctl(fd, FIONREAD, &unread);
    log_event(LOG_WARN, "connection_ended",
              "pid=%d reason=\"%s\" received=%llu unread=%d messages=%llu waiting=%llu",
              (int)c->pid, reason, (unsigned long long)c->n_bytes, unread,
              (unsigned long long)c->n_messages, (unsigned long long)c->frames.waiting);
}

/* The one with the most, when all together have too much. */
static void end_largest(void) {
    int largest = 0;
    for (int fd = 0; fd < highest; fd++) {
        if (!table[fd].used) continue;
        if (!is_same(fd)) {
            forget(fd);
            continue;
        }
        if (!table[fd].ended && table[fd].frames.waiting > table[largest].frames.waiting)
            largest = fd;
    }
    if (waiting <= CONNECTIONS_ALL || !table[largest].used) return;
    end(largest, "all connections together have sent too much");
    shutdown(largest, SHUT_RDWR);
}

bool connections_add(int fd) {
    struct ucred peer = {0};
    struct stat info;
    socklen_t size = sizeof peer;
    if (fd >= MOST || fstat(fd, &info) != 0) return false;
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    pthread_mutex_lock(&lock);
    if (table[fd].used) forget(fd);
    const bool fits = peer.pid == 0 || !has_many(peer.pid);
    if (fits)
        table[fd] = (connection_t){.used = true,
                                   .serial = ++serials,
                                   .inode = info.st_ino,
                                   .pid = peer.pid,
                                   .heard_ms = now_ms(),
                                   .frames = frames_begin()};
    if (fits && fd >= highest) highest = fd + 1;
    pthread_mutex_unlock(&lock);
    return fits;
}

void connections_taken(int fd, uint64_t bytes, int n_frames) {
    if (fd < 0 || fd >= MOST) return;
    pthread_mutex_lock(&lock);
    connection_t *c = &table[fd];
    const uint64_t taken = bytes + (uint64_t)n_frames * FRAME_BYTES;
    const uint64_t less = taken < c->frames.waiting ? taken : c->frames.waiting;
    c->frames.waiting -= less;
    waiting -= less;
    c->n_messages++;
    c->heard_ms = now_ms();
    pthread_mutex_unlock(&lock);
}

uint64_t connections_keep(int fd) {
    if (fd < 0 || fd >= MOST) return 0;
    pthread_mutex_lock(&lock);
    table[fd].kept = true;
    const uint64_t serial = table[fd].serial;
    pthread_mutex_unlock(&lock);
    return serial;
}

bool connections_live(int fd, uint64_t serial) {
    if (fd < 0 || fd >= MOST || !serial) return true;
    pthread_mutex_lock(&lock);
    const bool lives = table[fd].used && table[fd].serial == serial && is_same(fd);
    pthread_mutex_unlock(&lock);
    return lives;
}

void connections_expire(int64_t now) {
    pthread_mutex_lock(&lock);
    for (int fd = 0; fd < highest; fd++) {
        const connection_t *c = &table[fd];
        if (!c->used || c->kept || now - c->heard_ms < CONNECTIONS_SILENT_MS) continue;
        if (!is_same(fd)) {
            forget(fd);
        } else if (!c->ended) {
            end(fd, "silent, and no session");
            shutdown(fd, SHUT_RDWR);
        }
    }
    pthread_mutex_unlock(&lock);
}

void connections_forgive(int64_t ms) {
    pthread_mutex_lock(&lock);
    for (int fd = 0; fd < highest; fd++)
        table[fd].heard_ms += ms;
    pthread_mutex_unlock(&lock);
}

/* ---- libzmq's call ---- */

static bool follow(int fd, const void *data, uint64_t bytes) {
    connection_t *c = &table[fd];
    if (!c->used) return true;
    c->n_bytes += bytes;
    const uint64_t before = c->frames.waiting;
    const bool fine = frames_read(&c->frames, data, bytes);
    waiting += c->frames.waiting - before;
    if (!fine)
        end(fd, "a message of more frames than any has");
    else if (c->frames.waiting > CONNECTIONS_WAITING)
        end(fd, "it sends more than is taken");
    else if (waiting > CONNECTIONS_ALL)
        end_largest();
    return !c->ended;
}

ssize_t recv(int fd, void *data, size_t bytes, int flags) {
    const ssize_t n = syscall(SYS_recvfrom, fd, data, bytes, flags, NULL, NULL);
    if (n <= 0 || fd < 0 || fd >= MOST) return n;
    pthread_mutex_lock(&lock);
    const bool goes_on = follow(fd, data, (uint64_t)n);
    pthread_mutex_unlock(&lock);
    return goes_on ? n : 0; /* as if it had closed */
}
