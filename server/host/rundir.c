/* Directory, lock and listening sockets. See rundir.h for the rules. */
#include "server/host/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/host/shared_dir.h"

#define LOCK_TRIES 50 /* of a millisecond each */

static const char *text_or(const char *text, const char *other) {
    return text && text[0] ? text : other;
}

gradd_status_t rundir_at(rundir_t *dir, const char *path) {
    size_t n = strlen(path);
    const size_t room = RUNDIR_PATH_MAX - 1 - strlen("/" RUNDIR_CMD);
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n == 0 || n > room)
        return GRADD_FAIL(IO, "directory '%.200s' has %zu bytes; a socket's path leaves %zu", path,
                          n, room);
    *dir = (rundir_t){.folder = -1, .lock = -1};
    memcpy(dir->path, path, n);
    memcpy(dir->cmd, path, n);
    strcpy(dir->cmd + n, "/" RUNDIR_CMD);
    memcpy(dir->ctl, path, n);
    strcpy(dir->ctl + n, "/" RUNDIR_CTL);
    return GRADD_OK;
}

gradd_status_t rundir_init(rundir_t *dir, const char *given) {
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char path[4096];
    if (runtime && runtime[0] == '/')
        snprintf(path, sizeof path, "%s/gradd", runtime);
    else
        snprintf(path, sizeof path, "%s/gradd-%u", text_or(getenv("TMPDIR"), "/tmp"),
                 (unsigned)geteuid());
    GRADD_TRY(rundir_at(dir, text_or(given, path)));
    return shared_dir_enter(dir);
}

void rundir_finish(rundir_t *dir) {
    if (dir->lock >= 0) close(dir->lock);
    if (dir->folder >= 0) close(dir->folder);
    dir->folder = dir->lock = -1;
}

gradd_status_t rundir_prepare(rundir_t *dir) {
    struct stat st;
    if (mkdir(dir->path, 0700) != 0 && errno != EEXIST)
        return GRADD_FAIL(IO, "cannot create directory %s: %s", dir->path, strerror(errno));
    if (lstat(dir->path, &st) != 0)
        return GRADD_FAIL(IO, "directory %s: %s", dir->path, strerror(errno));
    if (S_ISLNK(st.st_mode)) return GRADD_FAIL(IO, "%s is a symbolic link", dir->path);
    if (!S_ISDIR(st.st_mode)) return GRADD_FAIL(IO, "%s is not a directory", dir->path);
    if (st.st_uid != geteuid())
        return GRADD_FAIL(IO, "directory %s belongs to uid %u, not to %u", dir->path,
                          (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_mode & 077)
        return GRADD_FAIL(IO, "directory %s has mode %03o; it must be 0700: chmod 700 %s",
                          dir->path, st.st_mode & 0777, dir->path);
    dir->folder = open(dir->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (dir->folder < 0)
        return GRADD_FAIL(IO, "cannot open directory %s: %s", dir->path, strerror(errno));
    return GRADD_OK;
}

int rundir_open(int folder, const char *name, int flags) {
    struct stat st;
    const int fd = openat(folder, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0 || (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))) return fd;
    close(fd);
    errno = ENXIO;
    return -1;
}

#define LOCK_PATH (RUNDIR_PATH_MAX + sizeof RUNDIR_LOCK)

static const char *lock_path(const rundir_t *dir, char path[LOCK_PATH]) {
    snprintf(path, LOCK_PATH, "%s/" RUNDIR_LOCK, dir->path);
    return path;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* The owner writes its pid right after it has locked, so an empty file is read again for a moment.
 */
static pid_t read_owner(int fd) {
    for (int i = 0; i < 100; i++) {
        char text[32];
        ssize_t n = pread(fd, text, sizeof text - 1, 0);
        if (n > 0) {
            text[n] = 0;
            long pid = strtol(text, NULL, 10);
            if (pid > 0) return (pid_t)pid;
        }
        usleep(1000);
    }
    return -1;
}

/* A process that checks the lock (rundir_is_locked) holds it for an instant: a lock counts as a
 * daemon's only if it persists. */
static bool take_lock(int fd) {
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
        if (errno != EWOULDBLOCK) return false;
        usleep(1000);
    }
    errno = EWOULDBLOCK;
    return false;
}

/* Of `ulimit -f`, the disk, or a quota on it. */
static bool is_without_room(int error) {
    return error == EFBIG || error == ENOSPC || error == EDQUOT;
}

gradd_status_t rundir_lock(rundir_t *dir, pid_t *out_owner) {
    int fd = rundir_open(dir->folder, RUNDIR_LOCK, O_CREAT | O_RDWR);
    if (fd < 0) return GRADD_FAIL(IO, "lock file in %s: %s", dir->path, strerror(errno));
    if (!take_lock(fd)) {
        if (errno != EWOULDBLOCK) {
            int error = errno;
            close(fd);
            return GRADD_FAIL(IO, "lock in %s: %s", dir->path, strerror(error));
        }
        *out_owner = read_owner(fd);
        close(fd);
        return GRADD_OK;
    }
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    bool written = ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)n, 0) == n;
    if (!written && !is_without_room(errno)) { /* the lock is what counts */
        int error = errno;
        close(fd);
        return GRADD_FAIL(IO, "lock file in %s: %s", dir->path, strerror(error));
    }
    dir->lock = fd;
    *out_owner = 0;
    return GRADD_OK;
}

pid_t rundir_owner(const rundir_t *dir) {
    char path[LOCK_PATH];
    int fd = rundir_open(AT_FDCWD, lock_path(dir, path), O_RDWR);
    if (fd < 0) return 0;
    bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    pid_t owner = locked ? read_owner(fd) : 0;
    close(fd);
    return owner;
}

bool rundir_is_locked(const rundir_t *dir) {
    return rundir_owner(dir) != 0;
}

/* ---- all daemons of a user ---- */

static int is_folder(const struct dirent *entry) {
    const bool may_be = entry->d_type == DT_DIR || entry->d_type == DT_UNKNOWN;
    return may_be && entry->d_name[0] != '.';
}

static gradd_status_t visit_folder(const rundir_t *dir, const char *name, rundir_visit_t visit,
                                   void *context) {
    char path[RUNDIR_PATH_MAX + 256];
    rundir_t inner;
    snprintf(path, sizeof path, "%s/%s", dir->path, name);
    if (rundir_init(&inner, path)) return GRADD_OK; /* too long: no daemon can be there */
    return visit(&inner, context);
}

gradd_status_t rundir_each(const char *given, rundir_visit_t visit, void *context) {
    rundir_t dir;
    struct dirent **folders;
    GRADD_TRY(rundir_init(&dir, given));
    gradd_status_t failure = visit(&dir, context);
    const int n_folders = scandir(dir.path, &folders, is_folder, alphasort);
    for (int i = 0; i < n_folders; i++) {
        const gradd_status_t status = visit_folder(&dir, folders[i]->d_name, visit, context);
        if (status) failure = status;
        free(folders[i]);
    }
    if (n_folders >= 0) free(folders);
    return failure;
}

typedef struct running_s {
    rundir_visit_t visit;
    void *context;
} running_t;

static gradd_status_t visit_running(const rundir_t *dir, void *context) {
    const running_t *running = context;
    return rundir_is_locked(dir) ? running->visit(dir, running->context) : GRADD_OK;
}

gradd_status_t rundir_each_running(const char *given, rundir_visit_t visit, void *context) {
    return rundir_each(given, visit_running, &(running_t){visit, context});
}

static const char *socket_path(const rundir_t *dir, rundir_socket_t which) {
    return which == RUNDIR_COMMANDS ? dir->cmd : dir->ctl;
}

static bool has_lock(const rundir_t *dir) {
    char path[LOCK_PATH];
    struct stat ours, there;
    return fstat(dir->lock, &ours) == 0 && lstat(lock_path(dir, path), &there) == 0 &&
           same_file(&ours, &there);
}

bool rundir_exists(const rundir_t *dir) {
    struct stat ours, there;
    return fstat(dir->folder, &ours) == 0 && lstat(dir->path, &there) == 0 &&
           same_file(&ours, &there);
}

bool rundir_owns(const rundir_t *dir) {
    struct stat ours, there;
    return dir->lock >= 0 && fstat(dir->lock, &ours) == 0 &&
           fstatat(dir->folder, RUNDIR_LOCK, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           same_file(&ours, &there);
}

bool rundir_has(const rundir_t *dir, rundir_socket_t which) {
    struct stat there;
    return lstat(socket_path(dir, which), &there) == 0 &&
           there.st_dev == dir->sockets[which].device && there.st_ino == dir->sockets[which].inode;
}

bool rundir_is_reachable(const rundir_t *dir) {
    return has_lock(dir) && rundir_has(dir, RUNDIR_COMMANDS) && rundir_has(dir, RUNDIR_CONTROL);
}

gradd_status_t rundir_restore(rundir_t *dir, pid_t *out_owner) {
    *out_owner = 0;
    if (has_lock(dir)) return GRADD_OK;
    rundir_t fresh = *dir;
    fresh.folder = fresh.lock = -1;
    gradd_status_t st = rundir_prepare(&fresh);
    if (st == GRADD_OK) st = rundir_lock(&fresh, out_owner);
    if (st != GRADD_OK || *out_owner != 0) {
        rundir_finish(&fresh);
        return st;
    }
    rundir_finish(dir);
    *dir = fresh;
    return GRADD_OK;
}

/* A socket bound to a path, and listening, which only we and a group may use. */
static gradd_status_t bind_at(const char *path, int type, gid_t group, int *out_fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return GRADD_FAIL(IO, "socket path %s is longer than %zu bytes", path,
                          sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    if (unlink(path) != 0 && errno != ENOENT)
        return GRADD_FAIL(IO, "cannot replace %s: %s", path, strerror(errno));
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return GRADD_FAIL(IO, "socket: %s", strerror(errno));
    mode_t mask = umask(group == RUNDIR_NO_GROUP ? 0177 : 0117);
    int rc = bind(fd, (struct sockaddr *)&address, sizeof address);
    if (rc == 0 && group != RUNDIR_NO_GROUP) rc = lchown(path, (uid_t)-1, group);
    int error = errno;
    umask(mask);
    if (rc == 0 && listen(fd, 128) != 0) {
        rc = -1;
        error = errno;
    }
    if (rc != 0) {
        close(fd);
        return GRADD_FAIL(IO, "cannot listen at %s: %s", path, strerror(error));
    }
    *out_fd = fd;
    return GRADD_OK;
}

gradd_status_t rundir_listen_for(rundir_t *dir, rundir_socket_t which, gid_t group, int *out_fd) {
    const char *path = socket_path(dir, which);
    const int type = which == RUNDIR_COMMANDS ? SOCK_STREAM : SOCK_SEQPACKET;
    struct stat made;
    GRADD_TRY(bind_at(path, type, group, out_fd));
    if (lstat(path, &made) != 0) made = (struct stat){0}; /* removed at once: made anew later */
    dir->sockets[which].device = made.st_dev;
    dir->sockets[which].inode = made.st_ino;
    return GRADD_OK;
}

gradd_status_t rundir_listen(rundir_t *dir, rundir_socket_t which, int *out_fd) {
    return rundir_listen_for(dir, which, RUNDIR_NO_GROUP, out_fd);
}

void rundir_unlisten(rundir_t *dir, rundir_socket_t which) {
    if (rundir_has(dir, which)) unlink(socket_path(dir, which));
    dir->sockets[which].inode = 0;
}

void rundir_unlink(const rundir_t *dir) {
    if (!rundir_owns(dir)) return;
    unlinkat(dir->folder, RUNDIR_CMD, 0);
    unlinkat(dir->folder, RUNDIR_CTL, 0);
    unlinkat(dir->folder, RUNDIR_LOST, 0);
}
