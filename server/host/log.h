/* Events of the daemon, one line each: time, level, event name, then key=value pairs.
 *
 * Only server/ logs; libraries return errors. Lines go to stderr in one write, so threads do not
 * mix. Never log a token, a nonce, or a path of a model. The level comes from GRADD_LOG.
 */
#ifndef GRADD_SERVER_HOST_LOG_H
#define GRADD_SERVER_HOST_LOG_H

#include <stdbool.h>

typedef enum log_level_e { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG } log_level_t;

/* Accepts "error", "warn", "info", "debug"; false leaves the level (info at start) unchanged. */
bool log_set_level(const char *name);

/* log_event(LOG_INFO, "session_end", "session=%u reason=%s", n, "detach"). Control characters in
 * the text are written as '?', so a client's name cannot forge a line. Any thread. */
void log_event(log_level_t level, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
