/* The folder and the names of its files are those of adapters/python/gradd/dynamo/disk_cache.py.
 * ORTMODULE_CACHE_DIR may name a folder that holds other files, which are left alone. */
#include "server/cli/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/explain/explain_report.h"

#define DIGITS     64 /* of a capture's name, hexadecimal */
#define UNFINISHED "new-"

typedef struct cached_s {
    char folder[4096];
    int64_t n, bytes; /* graphs */
} cached_t;

static gradd_status_t find_folder(cached_t *cached) {
    const char *named = getenv("ORTMODULE_CACHE_DIR"), *given = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    const char *form = "%s";
    if (!named || !named[0]) {
        named = given && given[0] == '/' ? given : home;
        form = named == given ? "%s/gradd/graphs" : "%s/.cache/gradd/graphs";
    }
    if (!named) return GRADD_FAIL(IO, "neither XDG_CACHE_HOME nor HOME names a folder");
    snprintf(cached->folder, sizeof cached->folder, form, named);
    return GRADD_OK;
}

static bool is_graph(const char *name) {
    return strlen(name) == DIGITS && strspn(name, "0123456789abcdef") == DIGITS;
}

static gradd_status_t visit(cached_t *cached, DIR *dir, bool clear) {
    for (struct dirent *entry; (entry = readdir(dir));) {
        struct stat info;
        const bool graph = is_graph(entry->d_name);
        if (!graph && strncmp(entry->d_name, UNFINISHED, strlen(UNFINISHED)) != 0) continue;
        if (fstatat(dirfd(dir), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (!S_ISREG(info.st_mode)) continue;
        if (clear && unlinkat(dirfd(dir), entry->d_name, 0) != 0 && errno != ENOENT)
            return GRADD_FAIL(IO, "cannot remove %s/%s: %s", cached->folder, entry->d_name,
                              strerror(errno));
        cached->n += graph;
        cached->bytes += graph ? (int64_t)info.st_size : 0;
    }
    return GRADD_OK;
}

gradd_status_t cache_show(FILE *out, bool clear, bool json) {
    cached_t cached = {0};
    GRADD_TRY(find_folder(&cached));
    DIR *dir = opendir(cached.folder);
    if (!dir && errno != ENOENT)
        return GRADD_FAIL(IO, "cannot read %s: %s", cached.folder, strerror(errno));
    gradd_status_t st = dir ? visit(&cached, dir, clear) : GRADD_OK;
    if (dir) closedir(dir);
    if (st != GRADD_OK) return st;
    if (json) {
        fprintf(out, "{\"%s\": %" PRId64 ", \"bytes\": %" PRId64 ", \"folder\": ",
                clear ? "removed" : "graphs", cached.n, cached.bytes);
        explain_json_text(out, cached.folder);
        fputs("}\n", out);
        return GRADD_OK;
    }
    fprintf(out, "%s%" PRId64 " graph%s, %.1f MiB, %s %s\n", clear ? "removed " : "", cached.n,
            cached.n == 1 ? "" : "s", (double)cached.bytes / (1 << 20), clear ? "from" : "in",
            cached.folder);
    return GRADD_OK;
}
