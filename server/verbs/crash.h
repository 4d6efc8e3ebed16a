/* A plan that crashes the worker is noted as one over which the device was lost (lost.h).
 *
 * A fault in a kernel, or an abort in a library, ends the process and thereby the work of all
 * sessions, and the client's repetition would do so again. So the signals of crashes have a handler
 * that writes down which plan was being made or run, and lets the process die. SIGKILL is no crash.
 */
#ifndef GRADD_SERVER_VERBS_CRASH_H
#define GRADD_SERVER_VERBS_CRASH_H

#include "server/verbs/lost.h"

/* Installs the handler. Engine thread: it gets a stack of its own for an overflow of its stack. */
void crash_guard(lost_plans_t *lost);
/* The same for the thread that makes plans (maker.h), once the engine thread has begun. */
void crash_guard_making(void);
/* From here on it is this plan's fault; NULL: no plan's. The key must stay valid until the next
 * call. Engine thread. */
void crash_blame(const uint8_t *key, bool backward);
void crash_blame_making(const uint8_t *key); /* faults of the thread that makes plans */

#endif
