/* Quotas: what sessions of a name may have of the daemon, in a file of its directory.
 *
 * A rule is for the sessions whose client says that name (`gradd ps` shows it); the rule OTHERS is
 * for all that have none of their own. Names are what clients say of themselves, and all clients
 * are processes of one user: rules are for getting along, not for protection. I/O thread.
 */
#ifndef GRADD_SERVER_SESSION_QUOTA_H
#define GRADD_SERVER_SESSION_QUOTA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#define QUOTA_NAME_BYTES 64 /* with the final 0 */
#define QUOTA_MOST       64 /* rules */
#define QUOTA_OTHERS     "others"
#define QUOTA_FILE       "quotas"

typedef struct quota_s {
    char name[QUOTA_NAME_BYTES];
    uint32_t share;      /* of the engine's time, see fair.h */
    uint32_t n_sessions; /* at once; 0 = any number */
    int64_t bytes;       /* of each session; 0 = any number */
} quota_t;

typedef struct quotas_s {
    int folder; /* Borrowed: where the file is; -1 = nothing is read or written */
    int n;
    quota_t rules[QUOTA_MOST];
} quotas_t;

/* Text of a client as a name: what is not printable, and spaces, become '_'. */
void quota_name(char out[QUOTA_NAME_BYTES], const char *text, size_t bytes);
/* Reads the file. Fails with IO, naming it, if it is damaged; the rules before that place hold. */
gradd_status_t quota_read(quotas_t *quotas, int folder);
/* The rule for a session of that name: its own, that of OTHERS, or one without limits. */
quota_t quota_for(const quotas_t *quotas, const char *name);
/* In place of the rule of that name, and writes the file. Fails with LIMIT (too many rules); with
 * IO if it cannot be written: the rule holds as long as the process lives. */
gradd_status_t quota_set(quotas_t *quotas, const quota_t *rule);
/* Forgets the rule of that name, and writes the file. Fails with UNSUPPORTED (there is none), IO as
 * above. */
gradd_status_t quota_remove(quotas_t *quotas, const char *name);

#endif
