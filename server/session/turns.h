/* The turns of a session's requests: three words in memory that the daemon, the client and its
 * device share. As those of a timeline semaphore, they only rise.
 *
 * A request with turn n may begin once `ready` is at least n: the client's device has then written
 * the memory that it reads. When it has succeeded the daemon raises `done` to n, for which the
 * client's device waits before it goes on. A failed request does not; all later ones of its chain
 * are refused, because they would read what it has not written.
 *
 * A backward in groups raises a third word as well, to n << TURNS_GROUP_BITS plus the number of
 * groups that are done, each time that a group is. The device of the daemon writes it, in turn
 * behind the gradients.
 */
#ifndef GRADD_SERVER_SESSION_TURNS_H
#define GRADD_SERVER_SESSION_TURNS_H

#include "server/session/session.h"

#define TURNS_READY      0 /* byte of the word */
#define TURNS_DONE       128
#define TURNS_GROUPS     256
#define TURNS_BYTES      (TURNS_GROUPS + 8)
#define TURNS_MOST_BYTES (1 << 16) /* a page: the event loop maps it */

#define TURNS_GROUP_BITS 16
#define TURNS_MAX_GROUPS 4096
#define TURNS_MAX        ((uint64_t)1 << 46) /* differences of words keep their sign */

/* The word that the client's device raises, or NULL: the session has none. */
static inline const uint64_t *turns_ready(const session_t *session) {
    return session->words.base ? (const uint64_t *)((const char *)session->words.base + TURNS_READY)
                               : NULL;
}

/* The device's address of the third word. */
static inline uint64_t *turns_groups(const session_t *session) {
    const gradd_segment_t *at = session->marks.base ? &session->marks : &session->words;
    return (uint64_t *)((char *)at->base + TURNS_GROUPS);
}

/* All that a request has written must be there before. */
static inline void turns_done(const session_t *session, uint64_t turn) {
    uint64_t *word = (uint64_t *)((char *)session->words.base + TURNS_DONE);
    __atomic_store_n(word, turn, __ATOMIC_RELEASE);
}

#endif
