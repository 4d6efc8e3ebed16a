/* Files that are written in place, by POSIX's functions. See platform.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "platform/files.h"

struct gradd_file_s {
    int fd;
    char *path; /* Owned */
};

static gradd_status_t failed(const char *what, const char *path) {
    return GRADD_FAIL(IO, "cannot %s '%s': %s", what, path, strerror(errno));
}

/* Whether the path still names what was opened: another program may have put a file in its place
 * before this one was locked. */
static bool is_named(int fd, const char *path) {
    struct stat own, named;
    return !fstat(fd, &own) && !stat(path, &named) && own.st_dev == named.st_dev &&
           own.st_ino == named.st_ino;
}

static gradd_status_t lock(int fd, const char *path, bool fresh) {
    struct stat st;
    if (fstat(fd, &st)) return failed("open", path);
    if (!S_ISREG(st.st_mode)) return GRADD_FAIL(IO, "'%s' is not a file", path);
    if (flock(fd, LOCK_EX | LOCK_NB) || !is_named(fd, path))
        return GRADD_FAIL(STALE, "'%s' is in use: this program or another has it open", path);
    if (fresh && ftruncate(fd, 0)) return failed("write", path);
    return GRADD_OK;
}

static gradd_status_t open_named(gradd_file_t *file, const char *path, bool fresh) {
    file->path = strdup(path);
    if (!file->path) return GRADD_FAIL(NOMEM, "no memory to open '%s'", path);
    const int how = O_RDWR | O_NONBLOCK | O_CLOEXEC | (fresh ? O_CREAT : 0); /* a fifo would wait */
    file->fd = open(path, how, 0666);
    if (file->fd < 0 && errno == ENOENT && !fresh) return GRADD_OK;
    if (file->fd < 0) return failed("open", path);
    return lock(file->fd, path, fresh);
}

static gradd_status_t keep_name(const char *path) {
    char *folder = strdup(path);
    if (!folder) return GRADD_FAIL(NOMEM, "no memory to open '%s'", path);
    files_keep_folder(folder);
    free(folder);
    return GRADD_OK;
}

gradd_status_t disk_open(const char *path, bool fresh, gradd_file_t **out_file) {
    gradd_file_t *file = malloc(sizeof *file);
    if (!file) return GRADD_FAIL(NOMEM, "no memory to open '%s'", path);
    *file = (gradd_file_t){.fd = -1};
    gradd_status_t status = open_named(file, path, fresh);
    const bool is_there = file->fd >= 0;
    if (!status && is_there && !fresh) status = keep_name(path);
    if (status || !is_there) disk_close(file, false);
    if (!status) *out_file = is_there ? file : NULL;
    return status;
}

void disk_close(gradd_file_t *file, bool remove) {
    if (!file) return;
    if (remove) unlink(file->path);
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    free(file);
}

bool disk_is_named(const gradd_file_t *file, const char *path) {
    struct stat st;
    if (path) return is_named(file->fd, path);
    if (is_named(file->fd, file->path)) return true;
    /* from another folder a relative path names nothing */
    return file->path[0] != '/' && !fstat(file->fd, &st) && st.st_nlink > 0;
}

gradd_status_t disk_bytes(gradd_file_t *file, uint64_t *out_bytes) {
    struct stat st;
    if (fstat(file->fd, &st)) return failed("read", file->path);
    *out_bytes = (uint64_t)st.st_size;
    return GRADD_OK;
}

gradd_status_t disk_read(gradd_file_t *file, uint64_t at, void *to, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t got = pread(file->fd, (char *)to + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return failed("read", file->path);
        if (!got) return GRADD_FAIL(IO, "'%s' became shorter while it was read", file->path);
        done += (size_t)got;
    }
    return GRADD_OK;
}

gradd_status_t disk_write(gradd_file_t *file, uint64_t at, const void *from, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t put =
            pwrite(file->fd, (const char *)from + done, n - done, (off_t)(at + done));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return failed("write", file->path);
        done += (size_t)put;
    }
    return GRADD_OK;
}

gradd_status_t disk_keep(gradd_file_t *file) {
#ifdef F_FULLFSYNC
    const bool kept = !fcntl(file->fd, F_FULLFSYNC); /* its fsync leaves the disk's own cache */
#else
    const bool kept = !fdatasync(file->fd);
#endif
    return kept ? GRADD_OK : failed("keep", file->path);
}

gradd_status_t disk_keep_as(gradd_file_t *file, const char *path) {
    char *name = strdup(path), *folder = strdup(path);
    gradd_status_t status = GRADD_OK;
    if (!name || !folder)
        status = GRADD_FAIL(NOMEM, "no memory to rename '%s'", path);
    else if (rename(file->path, path))
        status = failed("write", path);
    if (!status) {
        free(file->path);
        file->path = name;
        name = NULL;
        files_keep_folder(folder);
    }
    free(name);
    free(folder);
    return status;
}

int disk_descriptor(const gradd_file_t *file) {
    return file->fd;
}
