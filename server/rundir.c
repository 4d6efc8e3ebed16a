/* Directory, lock and listening sockets. See rundir.h for the rules. */
#include "server/rundir.h"

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

static const char *text_or(const char *text, const char *other) {
    return text && text[0] ? text : other;
}

gradd_status_t rundir_init(rundir_t *dir, const char *given) {
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char path[4096];
    int n;
    if (given && given[0])
        n = snprintf(path, sizeof path, "%s", given);
    else if (runtime && runtime[0] == '/')
        n = snprintf(path, sizeof path, "%s/gradd", runtime);
    else
        n = snprintf(path, sizeof path, "%s/gradd-%u", text_or(getenv("TMPDIR"), "/tmp"),
                     (unsigned)geteuid());
    while (n > 1 && n < (int)sizeof path && path[n - 1] == '/')
        path[--n] = 0;
    int room = RUNDIR_PATH_MAX - 1 - (int)strlen("/" RUNDIR_CMD);
    if (n <= 0 || n > room)
        return GRADD_FAIL(IO, "directory '%.200s' has %d bytes; a socket's path leaves %d", path, n,
                          room);
    *dir = (rundir_t){.lock = -1};
    memcpy(dir->path, path, (size_t)n + 1);
    memcpy(dir->cmd, path, (size_t)n);
    strcpy(dir->cmd + n, "/" RUNDIR_CMD);
    memcpy(dir->ctl, path, (size_t)n);
    strcpy(dir->ctl + n, "/" RUNDIR_CTL);
    return GRADD_OK;
}

void rundir_finish(rundir_t *dir) {
    if (dir->lock >= 0) close(dir->lock);
    dir->lock = -1;
}

gradd_status_t rundir_prepare(const rundir_t *dir) {
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
        return GRADD_FAIL(IO, "directory %s has mode %03o; it must be 0700 (chmod 700 it)",
                          dir->path, st.st_mode & 0777);
    return GRADD_OK;
}

static int open_lock(const rundir_t *dir, int flags) {
    char path[RUNDIR_PATH_MAX + sizeof RUNDIR_LOCK];
    snprintf(path, sizeof path, "%s/" RUNDIR_LOCK, dir->path);
    return open(path, flags | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
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

gradd_status_t rundir_lock(rundir_t *dir, pid_t *out_owner) {
    int fd = open_lock(dir, O_CREAT);
    if (fd < 0) return GRADD_FAIL(IO, "lock file in %s: %s", dir->path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
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
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n) {
        int error = errno;
        close(fd);
        return GRADD_FAIL(IO, "lock file in %s: %s", dir->path, strerror(error));
    }
    dir->lock = fd;
    *out_owner = 0;
    return GRADD_OK;
}

bool rundir_is_locked(const rundir_t *dir) {
    int fd = open_lock(dir, 0);
    if (fd < 0) return false;
    bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(fd);
    return locked;
}

gradd_status_t rundir_listen(const char *path, int type, int *out_fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return GRADD_FAIL(IO, "socket path %s is longer than %zu bytes", path,
                          sizeof address.sun_path - 1);
    strcpy(address.sun_path, path);
    if (unlink(path) != 0 && errno != ENOENT)
        return GRADD_FAIL(IO, "cannot replace %s: %s", path, strerror(errno));
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return GRADD_FAIL(IO, "socket: %s", strerror(errno));
    mode_t mask = umask(0177);
    int rc = bind(fd, (struct sockaddr *)&address, sizeof address);
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

void rundir_unlink(const rundir_t *dir) {
    unlink(dir->cmd);
    unlink(dir->ctl);
}
