/* What replies to `ps`, `show` and `trace` say about a session. I/O thread. */
#ifndef GRADD_SERVER_DAEMON_SHOWN_H
#define GRADD_SERVER_DAEMON_SHOWN_H

#include "server/session/session.h"
#include "server/wire/wire.h"

/* A pair of a map. */
void shown_text(wire_out_t *out, const char *key, const char *value);
void shown_number(wire_out_t *out, const char *key, int64_t value);
/* One map: what it has, and its pace. */
void shown_session(wire_out_t *out, session_t *session);
/* The same with its plans and last failures. */
void shown_in_full(wire_out_t *out, session_t *session);

#endif
