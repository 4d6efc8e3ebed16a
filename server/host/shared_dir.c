/* See shared_dir.h. */
#include "server/host/shared_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODE       0750
#define NAME_BYTES 12 /* of a uid */

static bool has_socket(const char *path) {
    char socket[RUNDIR_PATH_MAX + sizeof SHARED_DIR_SOCKET];
    struct stat st;
    const int n = snprintf(socket, sizeof socket, "%s/" SHARED_DIR_SOCKET, path);
    return n < (int)sizeof socket && lstat(socket, &st) == 0 && S_ISSOCK(st.st_mode) &&
           st.st_uid == 0;
}

bool shared_dir_is(const char *path) {
    struct stat st;
    if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != 0) return false;
    return (st.st_mode & 0777) == MODE && (geteuid() != 0 || has_socket(path));
}

gradd_status_t shared_dir_enter(rundir_t *dir) {
    char path[RUNDIR_PATH_MAX + 1 + NAME_BYTES];
    if (!shared_dir_is(dir->path)) return GRADD_OK;
    snprintf(path, sizeof path, "%s/%u", dir->path, (unsigned)geteuid());
    return rundir_at(dir, path);
}

bool shared_dir_around(const rundir_t *dir, char out_path[RUNDIR_PATH_MAX]) {
    char parent[RUNDIR_PATH_MAX], real[PATH_MAX], name[NAME_BYTES];
    snprintf(name, sizeof name, "%u", (unsigned)geteuid());
    snprintf(parent, sizeof parent, "%s", dir->path);
    char *slash = strrchr(parent, '/');
    if (!slash || slash == parent || strcmp(slash + 1, name) != 0) return false;
    *slash = 0;
    if (!shared_dir_is(parent) || !realpath(parent, real)) return false;
    return snprintf(out_path, RUNDIR_PATH_MAX, "%s", real) < RUNDIR_PATH_MAX;
}

/* A user that can rename a parent could put another directory in the place of ours. */
static gradd_status_t check_parents(const char *path) {
    char parent[PATH_MAX];
    struct stat st;
    snprintf(parent, sizeof parent, "%s", path);
    for (;;) {
        if (lstat(parent, &st) != 0)
            return GRADD_FAIL(IO, "directory %s: %s", parent, strerror(errno));
        const bool is_open = (st.st_mode & 022) && !(st.st_mode & S_ISVTX);
        if (st.st_uid != 0 || is_open)
            return GRADD_FAIL(IO,
                              "%s, above a shared directory, belongs to uid %u and has mode %04o; "
                              "only root may be able to change it",
                              parent, (unsigned)st.st_uid, st.st_mode & 07777);
        if (!parent[1]) return GRADD_OK; /* the root of all */
        char *slash = strrchr(parent, '/');
        slash[slash == parent] = 0;
    }
}

/* Parents without links, so that all have one name for the directory; itself it must be none. */
static gradd_status_t resolve(rundir_t *dir) {
    char parent[RUNDIR_PATH_MAX], real[PATH_MAX], path[PATH_MAX + RUNDIR_PATH_MAX];
    snprintf(parent, sizeof parent, "%s", dir->path);
    char *slash = strrchr(parent, '/');
    *slash = 0;
    if (!realpath(slash == parent ? "/" : parent, real))
        return GRADD_FAIL(IO, "directory %s: %s", parent, strerror(errno));
    GRADD_TRY(check_parents(real));
    snprintf(path, sizeof path, "%s/%s", strcmp(real, "/") ? real : "", slash + 1);
    return rundir_at(dir, path);
}

gradd_status_t shared_dir_init(rundir_t *dir, const char *path) {
    if (!path || path[0] != '/')
        return GRADD_FAIL(IO, "a shared directory needs an absolute path, as /run/gradd; got '%s'",
                          path ? path : "");
    GRADD_TRY(rundir_at(dir, path));
    GRADD_TRY(resolve(dir));
    const int n = snprintf(dir->ctl, sizeof dir->ctl, "%s/" SHARED_DIR_SOCKET, dir->path);
    if (n < (int)sizeof dir->ctl) return GRADD_OK;
    return GRADD_FAIL(IO, "directory '%s' is too long for a socket's path", dir->path);
}

static gradd_status_t check_opened(const rundir_t *dir, gid_t group) {
    struct stat st;
    if (fstat(dir->folder, &st) != 0)
        return GRADD_FAIL(IO, "directory %s: %s", dir->path, strerror(errno));
    if (st.st_uid != geteuid())
        return GRADD_FAIL(IO, "directory %s belongs to uid %u, not to %u", dir->path,
                          (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_gid == group && (st.st_mode & 0777) == MODE) return GRADD_OK;
    return GRADD_FAIL(IO,
                      "directory %s has group %u and mode %03o; for the users of group %u it must "
                      "have that group and mode %03o: chgrp %u %s; chmod %o %s",
                      dir->path, (unsigned)st.st_gid, st.st_mode & 0777, (unsigned)group, MODE,
                      (unsigned)group, dir->path, MODE, dir->path);
}

gradd_status_t shared_dir_prepare(rundir_t *dir, gid_t group) {
    const bool made = mkdir(dir->path, 0700) == 0;
    if (!made && errno != EEXIST)
        return GRADD_FAIL(IO, "cannot create directory %s: %s", dir->path, strerror(errno));
    dir->folder = open(dir->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (dir->folder < 0 && (errno == ENOTDIR || errno == ELOOP))
        return GRADD_FAIL(IO, "%s is a symbolic link, or no directory", dir->path);
    if (dir->folder < 0)
        return GRADD_FAIL(IO, "cannot open directory %s: %s", dir->path, strerror(errno));
    if (made &&
        (fchown(dir->folder, (uid_t)-1, group) != 0 || fchmod(dir->folder, (mode_t)MODE) != 0))
        return GRADD_FAIL(IO, "directory %s: %s", dir->path, strerror(errno));
    return check_opened(dir, group);
}

gradd_status_t shared_dir_make_folder(const rundir_t *dir, uid_t uid, gid_t gid) {
    char name[NAME_BYTES];
    struct stat st;
    snprintf(name, sizeof name, "%u", (unsigned)uid);
    const bool made = mkdirat(dir->folder, name, 0700) == 0;
    if (!made && errno != EEXIST)
        return GRADD_FAIL(IO, "cannot create %s/%s: %s", dir->path, name, strerror(errno));
    if (fstatat(dir->folder, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return GRADD_FAIL(IO, "%s/%s: %s", dir->path, name, strerror(errno));
    /* Root's: just made, or by a supervisor that was killed before it could give it away. */
    if (S_ISDIR(st.st_mode) && st.st_uid == 0 && uid != 0) {
        if (fchownat(dir->folder, name, uid, gid, AT_SYMLINK_NOFOLLOW) != 0)
            return GRADD_FAIL(IO, "%s/%s: chown: %s", dir->path, name, strerror(errno));
        st.st_uid = uid;
    }
    if (S_ISDIR(st.st_mode) && st.st_uid == uid && !(st.st_mode & 077)) return GRADD_OK;
    return GRADD_FAIL(IO, "%s/%s is not a directory of uid %u with mode 0700", dir->path, name,
                      (unsigned)uid);
}
