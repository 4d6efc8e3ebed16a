/* The turns of a session's requests: two words in memory that the daemon, the client and its device
 * share. As those of a timeline semaphore, they only rise.
 *
 * A request with turn n may begin once `ready` is at least n: the client's device has then written
 * the memory that it reads. When it has succeeded the daemon raises `done` to n, for which the
 * client's device waits before it goes on. A failed request does not; all later ones of its chain
 * are refused, because they would read what it has not written.
 */
#ifndef GRADD_SERVER_SESSION_TURNS_H
#define GRADD_SERVER_SESSION_TURNS_H

#include "server/session/session.h"

#define TURNS_READY 0 /* byte of the word */
#define TURNS_DONE  128
#define TURNS_BYTES (TURNS_DONE + 8)

/* The word that the client's device raises, or NULL: the session has none. */
static inline const uint64_t *turns_ready(const session_t *session) {
    return session->words.base ? (const uint64_t *)((const char *)session->words.base + TURNS_READY)
                               : NULL;
}

/* All that a request has written must be there before. */
static inline void turns_done(const session_t *session, uint64_t turn) {
    uint64_t *word = (uint64_t *)((char *)session->words.base + TURNS_DONE);
    __atomic_store_n(word, turn, __ATOMIC_RELEASE);
}

#endif
