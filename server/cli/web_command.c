/* See web_command.h. */
#include "server/cli/web_command.h"

#include <stdlib.h>
#include <string.h>

#include "server/cli/admin.h"
#include "server/cli/owner_command.h"
#include "server/session/session.h"
#include "server/web/web.h"

#define MOST_DAEMONS 64
#define KEPT_MS      10000 /* a list is that old at most: to ask for it is a connection each time */

/* Kept sessions of one daemon. */
typedef struct kept_list_s {
    char path[RUNDIR_PATH_MAX]; /* "": not used */
    int64_t asked_ms;
    uint8_t *buffer; /* Owned */
    wire_doc_t doc;
    const msgpack_object *list; /* NULL: it has not answered */
} kept_list_t;

typedef struct source_s {
    const char *given; /* Borrowed: the directory of the command line */
    size_t n_path;     /* of the user's directory: those of GPUs lie in it */
    kept_list_t kept[MOST_DAEMONS];
} source_t;

typedef struct visit_s {
    source_t *source;
    web_visit_t visit;
    void *visitor;
} visit_t;

static kept_list_t *place_for(source_t *source, const char *path) {
    kept_list_t *oldest = &source->kept[0];
    for (int i = 0; i < MOST_DAEMONS; i++) {
        kept_list_t *kept = &source->kept[i];
        if (strcmp(kept->path, path) == 0) return kept;
        if (kept->asked_ms < oldest->asked_ms) oldest = kept;
    }
    snprintf(oldest->path, sizeof oldest->path, "%s", path);
    oldest->asked_ms = 0;
    return oldest;
}

static const msgpack_object *find_kept(source_t *source, const rundir_t *dir) {
    kept_list_t *kept = place_for(source, dir->path);
    const int64_t now = session_now_ms();
    if (kept->asked_ms && now - kept->asked_ms < KEPT_MS) return kept->list;
    kept->asked_ms = now;
    wire_doc_finish(&kept->doc);
    kept->list = NULL;
    if (!kept->buffer) kept->buffer = malloc(KEPT_REPLY_BYTES);
    if (kept->buffer) kept->list = kept_ask(dir, kept->buffer, &kept->doc);
    return kept->list;
}

static gradd_status_t look_at(const rundir_t *dir, void *context) {
    const visit_t *visit = context;
    const char *folder = strrchr(dir->path, '/');
    const bool is_user = strlen(dir->path) == visit->source->n_path;
    admin_reply_t reply;
    const bool answers = admin_ask_ps(dir, &reply) == GRADD_OK;
    const web_daemon_t daemon = {.name = is_user || !folder ? "main" : folder + 1,
                                 .root = answers ? &reply.doc.root : NULL,
                                 .kept = answers ? find_kept(visit->source, dir) : NULL};
    visit->visit(&daemon, visit->visitor);
    admin_finish(&reply);
    return GRADD_OK;
}

static void look(void *context, web_visit_t visit, void *visitor) {
    source_t *source = context;
    visit_t all = {source, visit, visitor};
    rundir_each_running(source->given, look_at, &all);
}

gradd_status_t web_command(rundir_t *dir, const options_t *options) {
    static source_t source; /* large */
    GRADD_TRY(rundir_prepare(dir));
    source = (source_t){.given = options->dir, .n_path = strlen(dir->path)};
    const web_options_t web = {.dir = dir,
                               .socket = options->socket,
                               .port = (int)options->port,
                               .look = look,
                               .context = &source};
    return web_serve(&web);
}
