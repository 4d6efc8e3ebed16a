/* See logs.h. Lines are those of server/host/log.h; others are the linker's, or of a crash. */
#include "server/cli/logs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_NAME     "daemon.log"
#define MOST_FILES    32
#define MOST_SESSIONS 1024 /* of one name, in the life of a daemon: later ones replace former */
#define FOLLOW_US     200000

typedef struct log_file_s {
    FILE *file; /* Owned */
    char path[RUNDIR_PATH_MAX + 16];
    unsigned long sessions[MOST_SESSIONS]; /* of the name that is looked for */
    unsigned n_sessions;
} log_file_t;

typedef struct logs_s {
    const char *name; /* Borrowed; NULL: all */
    bool json;
    log_file_t *files; /* Owned */
    int n;
} logs_t;

/* ---- pairs of a line ---- */

typedef struct pair_s {
    const char *key, *value;
    int n_key, n_value;
} pair_t;

/* The next pair of a line, from *at on; a quoted value is without its quotes. */
static bool next_pair(const char **at, pair_t *out) {
    const char *p = *at + strspn(*at, " \n");
    out->key = p;
    out->n_key = (int)strcspn(p, "= \n");
    p += out->n_key;
    if (*p != '=') return false;
    const bool quoted = p[1] == '"';
    out->value = p + 1 + quoted;
    const char *end = quoted ? strstr(out->value, "\" ") : NULL;
    if (quoted && !end) end = strrchr(out->value, '"');
    if (!end) end = out->value + strcspn(out->value, quoted ? "\n" : " \n");
    out->n_value = (int)(end - out->value);
    *at = end + (*end == '"');
    return true;
}

static bool is_text(const char *text, int n, const char *other) {
    return (int)strlen(other) == n && memcmp(text, other, (size_t)n) == 0;
}

static bool has(const char *line, const char *key, const char *value) {
    pair_t pair;
    while (next_pair(&line, &pair))
        if (is_text(pair.key, pair.n_key, key) && is_text(pair.value, pair.n_value, value))
            return true;
    return false;
}

static unsigned long session_of(const char *line) {
    pair_t pair;
    while (next_pair(&line, &pair))
        if (is_text(pair.key, pair.n_key, "session")) return strtoul(pair.value, NULL, 10);
    return 0;
}

/* Where the pairs begin, behind the time; NULL: a line of another kind. */
static const char *pairs_of(const char *line) {
    const char *blank = strchr(line, ' ');
    return blank && line[0] >= '0' && line[0] <= '9' && !strncmp(blank, " level=", 7) ? blank + 1
                                                                                      : NULL;
}

static bool is_known(const log_file_t *file, unsigned long session) {
    const unsigned n = file->n_sessions < MOST_SESSIONS ? file->n_sessions : MOST_SESSIONS;
    for (unsigned i = 0; i < n; i++)
        if (file->sessions[i] == session) return true;
    return false;
}

static bool is_about(log_file_t *file, const char *pairs, const char *name) {
    if (!pairs) return false;
    if (has(pairs, "event", "daemon_start")) file->n_sessions = 0; /* sessions restart at 1 */
    const unsigned long session = session_of(pairs);
    const bool named = has(pairs, "client", name) || has(pairs, "pid", name) ||
                       has(pairs, "session", name) || has(pairs, "name", name);
    if (named && session && !is_known(file, session))
        file->sessions[file->n_sessions++ % MOST_SESSIONS] = session;
    return named || (session && is_known(file, session));
}

/* ---- output ---- */

static void put_json_text(const char *text, int n) {
    putchar('"');
    for (int i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == '"' || c == '\\' || c >= 0x7f)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void print_json_line(const char *line, const char *pairs) {
    pair_t pair;
    if (!pairs) {
        fputs("{\"text\": ", stdout);
        put_json_text(line, (int)strcspn(line, "\n"));
        puts("}");
        return;
    }
    fputs("{\"time\": ", stdout);
    put_json_text(line, (int)(pairs - line - 1));
    while (next_pair(&pairs, &pair)) {
        fputs(", ", stdout);
        put_json_text(pair.key, pair.n_key);
        fputs(": ", stdout);
        put_json_text(pair.value, pair.n_value);
    }
    puts("}");
}

static void print_line(const logs_t *logs, log_file_t *file, const char *line) {
    const char *pairs = pairs_of(line);
    if (logs->name && !is_about(file, pairs, logs->name)) return;
    if (logs->json)
        print_json_line(line, pairs);
    else
        fputs(line, stdout);
}

/* What has come since the last time. A file that has become shorter is read again. */
static void print_new(const logs_t *logs, log_file_t *file) {
    char *line = NULL;
    size_t capacity = 0;
    struct stat info;
    clearerr(file->file);
    if (fstat(fileno(file->file), &info) == 0 && info.st_size < ftell(file->file))
        rewind(file->file);
    while (getline(&line, &capacity, file->file) >= 0)
        print_line(logs, file, line);
    free(line);
    fflush(stdout);
}

/* ---- files ---- */

static void add_file(logs_t *logs, const char *folder) {
    log_file_t *file = &logs->files[logs->n];
    if (logs->n == MOST_FILES) return;
    const int n = snprintf(file->path, sizeof file->path, "%s/%s", folder, FILE_NAME);
    if (n < 0 || (size_t)n >= sizeof file->path) return;
    const int fd = rundir_open(AT_FDCWD, file->path, O_RDONLY);
    if (fd < 0) return;
    file->file = fdopen(fd, "r");
    if (file->file)
        logs->n++;
    else
        close(fd);
}

static gradd_status_t add_folder(const rundir_t *dir, void *context) {
    add_file(context, dir->path);
    return GRADD_OK;
}

gradd_status_t logs_show(const rundir_t *dir, const options_t *options) {
    logs_t logs = {.name = options->name, .json = options->json};
    logs.files = calloc(MOST_FILES, sizeof *logs.files);
    if (!logs.files) return GRADD_FAIL(NOMEM, "no memory for a list of logs");
    gradd_status_t st = rundir_each(options->dir, add_folder, &logs);
    if (st == GRADD_OK && logs.n == 0)
        st = GRADD_FAIL(IO,
                        "there is no %s/" FILE_NAME ": a daemon that no client has started logs "
                        "to its stderr, a unit's to the journal (journalctl --user -u gradd)",
                        dir->path);
    for (bool first = true; st == GRADD_OK && (first || options->follow); first = false) {
        if (!first) usleep(FOLLOW_US);
        for (int i = 0; i < logs.n; i++)
            print_new(&logs, &logs.files[i]);
        if (ferror(stdout)) break; /* the reader has gone */
    }
    for (int i = 0; i < logs.n; i++)
        fclose(logs.files[i].file);
    free(logs.files);
    return st;
}
