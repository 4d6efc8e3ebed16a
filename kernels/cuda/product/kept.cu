/* See kept.h. */
#include "kernels/cuda/product/kept.h"

#include <ctype.h>
#include <cublasLt.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/cuda/product/measure.h"
#include "shm/hash.h"

enum {
    MOST_BYTES = 8 << 20, /* of a file: some 10000 products */
    LOCK_TRIES = 100,
    LOCK_WAIT_US = 10000,
    SHOWN_WORDS = sizeof(gpu_kept_t) / sizeof(uint64_t),
    LINE = GPU_KEPT_KEY + 17 * (SHOWN_WORDS + 1) + 4
};

typedef struct kept_entry_s {
    char key[GPU_KEPT_KEY];
    gpu_kept_t kept;
} kept_entry_t;

/* All that was read and written. */
static struct {
    kept_entry_t *entries;
    int n, capacity;
    off_t read; /* bytes of the file that are in the list */
    bool begun; /* the names below are set */
    char path[4096], title[300];
    char why[200]; /* what was in the way last; "" = nothing */
} kept;

double gpu_kept_least(void) {
    static const char *const off[] = {"0", "false", "no", "off"};
    const char *value = getenv("GRADD_CUDA_TUNE");
    for (size_t i = 0; value && i < sizeof off / sizeof off[0]; i++)
        if (!strcmp(value, off[i])) return INFINITY;
    return value && !strcmp(value, "all") ? 0 : 1e9;
}

void gpu_kept_forget(void) {
    free(kept.entries);
    kept = {};
}

/* ---- names ----------------------------------------------------------------------------------- */

/* The cache folder of the user; "" = there is none. */
static void cache_folder(char *out, size_t bytes) {
    const char *given = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    out[0] = 0;
    if (given && given[0] == '/')
        snprintf(out, bytes, "%s", given);
    else if (home && home[0] == '/')
        snprintf(out, bytes, "%s/.cache", home);
}

static void begin(void) {
    char folder[3000], name[128];
    const gpu_device_t device = gpu_device();
    const size_t library = cublasLtGetVersion();
    size_t n = 0;
    if (kept.begun) return;
    kept.begun = true;
    for (const char *c = device.name; *c && n + 1 < sizeof name; c++)
        name[n++] = isalnum((unsigned char)*c) ? *c : '-';
    name[n] = 0;
    snprintf(kept.title, sizeof kept.title, "gradd products 1 | %.120s | cuBLASLt %zu | driver %d",
             device.name, library, device.driver);
    cache_folder(folder, sizeof folder);
    if (folder[0])
        snprintf(kept.path, sizeof kept.path, "%s/gradd/products/%s-lt%zu-driver%d.txt", folder,
                 name, library, device.driver);
    else
        snprintf(kept.why, sizeof kept.why, "neither XDG_CACHE_HOME nor HOME names a folder");
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* Key, words and a sum of both, without the line's end. */
static int write_line(char *line, const char *key, const gpu_kept_t *one) {
    int n = snprintf(line, LINE, "%s|", key);
    for (int i = 0; i < SHOWN_WORDS; i++)
        n += snprintf(line + n, (size_t)(LINE - n), "%016llx ", (unsigned long long)one->data[i]);
    const uint64_t sum = gradd_hash_bytes(GRADD_HASH_START, line, (size_t)n);
    return n + snprintf(line + n, (size_t)(LINE - n), "%016llx", (unsigned long long)sum);
}

/* The text is a line if it is what would have been written. */
static bool read_line(const char *text, size_t bytes, kept_entry_t *out) {
    char again[LINE];
    const char *bar = (const char *)memchr(text, '|', bytes);
    const size_t n = bar ? (size_t)(bar - text) : 0;
    if (!bar || n >= GPU_KEPT_KEY || bytes != n + 1 + 17 * SHOWN_WORDS + 16) return false;
    memcpy(out->key, text, n);
    out->key[n] = 0;
    for (int i = 0; i < SHOWN_WORDS; i++)
        out->kept.data[i] = strtoull(bar + 1 + 17 * i, NULL, 16);
    return write_line(again, out->key, &out->kept) == (int)bytes && !memcmp(again, text, bytes);
}

static void remember(const kept_entry_t *entry) {
    if (kept.n == kept.capacity) {
        const int more = kept.capacity ? 2 * kept.capacity : 64;
        kept_entry_t *grown = (kept_entry_t *)realloc(kept.entries, sizeof *grown * (size_t)more);
        if (!grown) return; /* it is measured again then */
        kept.entries = grown;
        kept.capacity = more;
    }
    kept.entries[kept.n++] = *entry;
}

/* Entries from `first` on; the last one of the key. */
static const gpu_kept_t *find(const char *key, int first) {
    for (int i = kept.n - 1; i >= first; i--)
        if (!strcmp(kept.entries[i].key, key)) return &kept.entries[i].kept;
    return NULL;
}

/* Takes whole lines, and says how many bytes they are; -1: the first one is not ours. */
static off_t take_lines(const char *text, size_t bytes, bool from_start) {
    size_t at = 0;
    for (;;) {
        const char *end = (const char *)memchr(text + at, '\n', bytes - at);
        if (!end) break;
        const size_t n = (size_t)(end - text) - at;
        kept_entry_t entry;
        if (from_start && !at) {
            if (n != strlen(kept.title) || memcmp(text, kept.title, n)) return -1;
        } else if (read_line(text + at, n, &entry)) {
            remember(&entry);
        }
        at += n + 1;
    }
    return from_start && !at ? -1 : (off_t)at;
}

/* ---- the file -------------------------------------------------------------------------------- */

static bool failed(const char *what) {
    snprintf(kept.why, sizeof kept.why, "%s: %s", what, strerror(errno));
    return false;
}

static void make_folders(void) {
    char path[sizeof kept.path];
    memcpy(path, kept.path, sizeof path);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700); /* what is in the way, opening the file says */
        *slash = '/';
    }
}

/* The file, a regular one of this user; -1 = there is none. */
static int open_file(int how) {
    struct stat st;
    begin();
    if (!kept.path[0]) return -1;
    kept.why[0] = 0;
    if (how & O_CREAT) make_folders();
    const int fd = open(kept.path, how | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0) {
        if (errno != ENOENT || how & O_CREAT) failed("it cannot be opened");
        return -1;
    }
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_uid == geteuid()) return fd;
    snprintf(kept.why, sizeof kept.why, "it is no file of this user");
    close(fd);
    return -1;
}

/* Reads what was added behind what is known. *out_size: all of it; *out_fresh: it starts over. */
static bool read_more(int fd, off_t *out_size, bool *out_fresh) {
    struct stat st;
    if (fstat(fd, &st)) return failed("it cannot be read");
    if (st.st_size < kept.read) kept.read = 0; /* another process has replaced the file */
    const size_t bytes = (size_t)(st.st_size - kept.read);
    *out_size = st.st_size;
    *out_fresh = st.st_size > MOST_BYTES;
    if (*out_fresh) return true;
    char *text = (char *)malloc(bytes + 1);
    if (!text) return failed("it cannot be read");
    const bool whole = pread(fd, text, bytes, kept.read) == (ssize_t)bytes;
    const off_t taken = whole ? take_lines(text, bytes, !kept.read) : 0;
    free(text);
    if (!whole) return failed("it cannot be read");
    *out_fresh = taken < 0;
    if (taken > 0) kept.read += taken;
    return true;
}

static void read_once(void) {
    off_t size;
    bool fresh;
    if (kept.begun) return;
    const int fd = open_file(O_RDONLY);
    if (fd < 0) return;
    read_more(fd, &size, &fresh);
    close(fd);
}

/* A process that was stopped may hold it for long. */
static bool lock(int fd) {
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (!flock(fd, LOCK_EX | LOCK_NB)) return true;
        if (errno != EWOULDBLOCK && errno != EINTR) break;
        usleep(LOCK_WAIT_US);
    }
    return failed("it cannot be locked");
}

/* Appends the line in one write: after the title if the file is new, and after a line break if the
 * last one is missing because its writer was killed. */
static bool append(int fd, const kept_entry_t *entry, off_t size, bool fresh) {
    char text[sizeof kept.title + LINE + 2], line[LINE];
    write_line(line, entry->key, &entry->kept);
    if (fresh && ftruncate(fd, 0)) return failed("it cannot be written");
    if (fresh) kept.read = 0;
    const bool torn = !fresh && size > kept.read;
    const int n = fresh ? snprintf(text, sizeof text, "%s\n%s\n", kept.title, line)
                        : snprintf(text, sizeof text, "%s%s\n", torn ? "\n" : "", line);
    if (write(fd, text, (size_t)n) != n) return failed("it cannot be written");
    return true;
}

/* ---- what others call ------------------------------------------------------------------------ */

bool gpu_kept_find(const char *key, gpu_kept_t *out) {
    read_once();
    const gpu_kept_t *found = find(key, 0);
    if (found) *out = *found;
    return found != NULL;
}

bool gpu_kept_ready(void) {
    const int fd = open_file(O_RDWR | O_CREAT | O_APPEND);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

/* Behind the lock: what another process has added, or the line. */
static bool add(int fd, kept_entry_t *entry) {
    const int before = kept.n;
    off_t size;
    bool fresh;
    if (!lock(fd) || !read_more(fd, &size, &fresh)) return false;
    const gpu_kept_t *theirs = find(entry->key, before);
    if (theirs) {
        entry->kept = *theirs;
        return true;
    }
    if (!append(fd, entry, size, fresh)) return false;
    return read_more(fd, &size, &fresh) && find(entry->key, before);
}

bool gpu_kept_add(const char *key, gpu_kept_t *io) {
    kept_entry_t entry = {};
    if (strlen(key) >= GPU_KEPT_KEY) return false;
    snprintf(entry.key, sizeof entry.key, "%s", key);
    entry.kept = *io;
    const int fd = open_file(O_RDWR | O_CREAT | O_APPEND);
    if (fd < 0) return false;
    const bool done = add(fd, &entry);
    close(fd); /* and the lock is gone */
    if (done) *io = entry.kept;
    return done;
}

/* Whether the file, or the folder that it would be made in, can be written. */
static bool is_writable(void) {
    char path[sizeof kept.path];
    memcpy(path, kept.path, sizeof path);
    for (char *slash; access(path, F_OK) && (slash = strrchr(path, '/'));)
        *slash = 0;
    return !path[0] || !access(path, W_OK) || failed("it cannot be written");
}

const char *gpu_kept_text(void) {
    static char text[sizeof kept.path + sizeof kept.why + 100];
    if (gpu_kept_least() == INFINITY)
        return "the library's first algorithms are taken (GRADD_CUDA_TUNE)";
    gpu_kept_forget();
    read_once();
    if (!kept.why[0] && is_writable())
        snprintf(text, sizeof text, "%d measured algorithms in %s", kept.n, kept.path);
    else
        snprintf(text, sizeof text, "no algorithm is measured, for none can be kept: %s%s%s",
                 kept.path, kept.path[0] ? ": " : "", kept.why);
    return text;
}
