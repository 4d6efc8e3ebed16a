/* See files.h. */
#include "platform/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BESIDE ".new"

static gradd_status_t failed(const char *what, const char *path) {
    return GRADD_FAIL(IO, "cannot %s '%s': %s", what, path, strerror(errno));
}

static gradd_status_t read_all(int fd, const char *path, char *to, size_t n) {
    for (size_t at = 0; at < n;) {
        const ssize_t got = read(fd, to + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return failed("read", path);
        if (!got) return GRADD_FAIL(IO, "'%s' became shorter while it was read", path);
        at += (size_t)got;
    }
    to[n] = 0;
    return GRADD_OK;
}

static gradd_status_t read_open(int fd, const char *path, size_t most, void **out_bytes,
                                size_t *out_n) {
    struct stat st;
    if (fstat(fd, &st)) return failed("read", path);
    if (!S_ISREG(st.st_mode)) return GRADD_FAIL(IO, "'%s' is not a file", path);
    if ((uint64_t)st.st_size > most || (uint64_t)st.st_size >= SIZE_MAX)
        return GRADD_FAIL(LIMIT, "'%s' has %lld bytes, at most %zu", path, (long long)st.st_size,
                          most);
    char *bytes = malloc((size_t)st.st_size + 1);
    if (!bytes) return GRADD_FAIL(NOMEM, "no memory for '%s'", path);
    const gradd_status_t status = read_all(fd, path, bytes, (size_t)st.st_size);
    if (status) {
        free(bytes);
        return status;
    }
    *out_bytes = bytes;
    *out_n = (size_t)st.st_size;
    return GRADD_OK;
}

gradd_status_t files_read(const char *path, size_t most, void **out_bytes, size_t *out_n) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a fifo would wait */
    if (fd < 0) return failed("open", path);
    const gradd_status_t status = read_open(fd, path, most, out_bytes, out_n);
    close(fd);
    return status;
}

static gradd_status_t write_all(int fd, const char *path, const gradd_file_part_t *part) {
    for (size_t at = 0; at < part->n;) {
        const ssize_t done = write(fd, (const char *)part->data + at, part->n - at);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return failed("write", path);
        at += (size_t)done;
    }
    return GRADD_OK;
}

/* What is in the file's place: nothing (mode 0), or a file, whose mode the new one gets. */
static gradd_status_t find_mode(const char *path, mode_t *out_mode) {
    struct stat st;
    *out_mode = 0;
    if (stat(path, &st)) return errno == ENOENT ? GRADD_OK : failed("write", path);
    if (!S_ISREG(st.st_mode)) return GRADD_FAIL(IO, "'%s' is there and not a file", path);
    *out_mode = st.st_mode & 0777;
    return GRADD_OK;
}

static gradd_status_t write_beside(const char *path, const char *beside,
                                   const gradd_file_part_t *parts, int n, mode_t mode) {
    const int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0) return failed("write", path);
    gradd_status_t status = GRADD_OK;
    if (mode && fchmod(fd, mode)) status = failed("write", path);
    for (int i = 0; i < n && !status; i++)
        status = write_all(fd, path, &parts[i]);
    if (!status && fsync(fd)) status = failed("write", path);
    if (close(fd) && !status) status = failed("write", path);
    return status;
}

void files_keep_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) slash[slash == path] = 0;
    const int fd = open(slash ? path : ".", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

static gradd_status_t replace(const char *path, const gradd_file_part_t *parts, int n) {
    mode_t mode;
    GRADD_TRY(find_mode(path, &mode));
    const size_t bytes = strlen(path) + sizeof BESIDE;
    char *beside = malloc(bytes);
    if (!beside) return GRADD_FAIL(NOMEM, "no memory to write '%s'", path);
    snprintf(beside, bytes, "%s" BESIDE, path);
    gradd_status_t status = write_beside(path, beside, parts, n, mode);
    if (!status && rename(beside, path)) status = failed("write", path);
    if (status)
        unlink(beside);
    else
        files_keep_folder(beside);
    free(beside);
    return status;
}

/* What a link names is replaced, not the link. */
gradd_status_t files_write(const char *path, const gradd_file_part_t *parts, int n) {
    char *target = realpath(path, NULL);
    const gradd_status_t status = replace(target ? target : path, parts, n);
    free(target);
    return status;
}
