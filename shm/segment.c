/* Sealed memfd segments. See segment.h for the contract.
 *
 * The checks and their reasons: the seals, because a client that can truncate its file kills every
 * process that has it mapped; the file system, because a hugetlb memfd raises SIGBUS when the pool
 * of huge pages is empty; reserved pages, because a sparse file makes the daemon allocate (and be
 * blamed for) memory that the client only claimed to have; the size from fstat, because a message
 * may say anything. errno is converted into a status here and nowhere else in this tier's memory
 * part.
 */
#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "shm/discard.h"

enum { NAME_MAX_BYTES = 200 };
#define SEALS_NEEDED  (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define SEALS_REFUSED (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)

static gradd_status_t check_claim(uint64_t bytes) {
    if (bytes == 0) return GRADD_FAIL(LIMIT, "a segment of 0 bytes");
    if (bytes > (uint64_t)INT64_MAX || bytes > SIZE_MAX)
        return GRADD_FAIL(LIMIT, "a segment of %llu bytes is beyond any file",
                          (unsigned long long)bytes);
    return GRADD_OK;
}

/* Memory files have no size limit of their own: asking for more than the machine has would wake the
 * kernel's out-of-memory killer instead of failing. */
static gradd_status_t check_machine(uint64_t bytes) {
    struct sysinfo info;
    if (sysinfo(&info) != 0) return GRADD_OK;
    uint64_t total = ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
    if (bytes > total)
        return GRADD_FAIL(NOSPC, "a segment of %llu bytes, the machine has %llu in total",
                          (unsigned long long)bytes, (unsigned long long)total);
    return GRADD_OK;
}

/* posix_fallocate gives its error as a value and may be interrupted on large files. */
static gradd_status_t reserve(int fd, uint64_t bytes) {
    int error;
    do {
        error = posix_fallocate(fd, 0, (off_t)bytes);
    } while (error == EINTR);
    if (error == ENOSPC || error == ENOMEM)
        return GRADD_FAIL(NOSPC, "no room for a shared segment of %llu bytes: %s",
                          (unsigned long long)bytes, strerror(error));
    if (error == EFBIG || error == EINVAL)
        return GRADD_FAIL(LIMIT, "cannot reserve %llu bytes: %s", (unsigned long long)bytes,
                          strerror(error));
    if (error) return GRADD_FAIL(SHM, "posix_fallocate: %s", strerror(error));
    return GRADD_OK;
}

gradd_status_t gradd_segment_create(const char *name, uint64_t bytes,
                                    gradd_segment_t *out_segment) {
    gradd_segment_t made = GRADD_SEGMENT_INIT;
    gradd_status_t status;
    GRADD_TRY(check_claim(bytes));
    GRADD_TRY(check_machine(bytes));
    if (strlen(name) > NAME_MAX_BYTES)
        return GRADD_FAIL(LIMIT, "a segment's name has at most %d bytes", NAME_MAX_BYTES);
    made.fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0) return GRADD_FAIL(SHM, "memfd_create: %s", strerror(errno));
    made.bytes = bytes;
    if ((status = reserve(made.fd, bytes)) != GRADD_OK) goto out;
    if (fcntl(made.fd, F_ADD_SEALS, SEALS_NEEDED) != 0) {
        status = GRADD_FAIL(SHM, "cannot seal a memfd: %s", strerror(errno));
        goto out;
    }
    if ((status = gradd_segment_map(&made)) != GRADD_OK) goto out;
    *out_segment = made;
    return GRADD_OK;
out:
    gradd_segment_finish(&made);
    return status;
}

static gradd_status_t check_seals(int seals, bool is_base) {
    if ((seals & SEALS_NEEDED) != SEALS_NEEDED)
        return GRADD_FAIL(SHM,
                          "the segment must be sealed against shrinking, growing and further "
                          "seals: it has 0x%x, needed 0x%x (shm_open objects cannot be sealed)",
                          (unsigned)seals, (unsigned)SEALS_NEEDED);
    if (is_base && !(seals & F_SEAL_WRITE))
        return GRADD_FAIL(SHM, "a base must be sealed against writing: it has 0x%x",
                          (unsigned)seals);
    if (!is_base && seals & SEALS_REFUSED)
        return GRADD_FAIL(SHM, "the segment is sealed against writing");
    return GRADD_OK;
}

static gradd_status_t check(int fd, bool is_base, uint64_t *out_bytes) {
    struct stat st;
    struct statfs fs;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0) return GRADD_FAIL(SHM, "not an open descriptor: %s", strerror(errno));
    if ((flags & O_ACCMODE) != O_RDWR || (flags & O_PATH))
        return GRADD_FAIL(SHM, "the segment must be open for reading and writing");
    int seals = fcntl(fd, F_GET_SEALS); /* before fstat, which asks the owner of a FUSE file */
    if (seals < 0) return GRADD_FAIL(SHM, "the descriptor is not a memfd (it has no seals)");
    if (fstat(fd, &st) != 0 || fstatfs(fd, &fs) != 0)
        return GRADD_FAIL(SHM, "cannot examine the segment: %s", strerror(errno));
    if (!S_ISREG(st.st_mode)) return GRADD_FAIL(SHM, "the descriptor is not a memfd");
    if ((unsigned long)fs.f_type == HUGETLBFS_MAGIC)
        return GRADD_FAIL(SHM, "a segment in huge pages can fault when the pool is empty: use "
                               "ordinary pages");
    GRADD_TRY(check_seals(seals, is_base));
    GRADD_TRY(check_claim((uint64_t)st.st_size));
    /* st_blocks counts units of 512 bytes, whatever the file system's block is. */
    if ((uint64_t)st.st_blocks < (uint64_t)st.st_size / 512)
        return GRADD_FAIL(NOSPC,
                          "only %llu of the segment's %llu bytes are reserved: call "
                          "posix_fallocate",
                          (unsigned long long)st.st_blocks * 512, (unsigned long long)st.st_size);
    *out_bytes = (uint64_t)st.st_size;
    return GRADD_OK;
}

gradd_status_t gradd_segment_check(int fd, uint64_t *out_bytes) {
    return check(fd, false, out_bytes);
}

gradd_status_t gradd_segment_check_base(int fd, uint64_t *out_bytes) {
    return check(fd, true, out_bytes);
}

gradd_status_t gradd_segment_open_base(int fd, uint64_t expect_bytes,
                                       gradd_segment_t *out_segment) {
    gradd_segment_t opened = GRADD_SEGMENT_INIT;
    GRADD_TRY(check(fd, true, &opened.bytes));
    if (opened.bytes != expect_bytes)
        return GRADD_FAIL(SHM, "the base has %llu bytes, the message said %llu",
                          (unsigned long long)opened.bytes, (unsigned long long)expect_bytes);
    /* Writable, so that no message of a client can end this process. No room is set aside. */
    opened.base =
        mmap(NULL, opened.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (opened.base == MAP_FAILED)
        return GRADD_FAIL(NOMEM, "no address space to map a base of %llu bytes: %s",
                          (unsigned long long)opened.bytes, strerror(errno));
    close(fd);
    *out_segment = opened;
    return GRADD_OK;
}

gradd_status_t gradd_segment_open(int fd, uint64_t expect_bytes, const gradd_mapper_t *mapper,
                                  gradd_segment_t *out_segment) {
    gradd_segment_t opened = {.fd = fd, .mapper = mapper};
    struct stat st;
    GRADD_TRY(gradd_segment_check(fd, &opened.bytes));
    if (fstat(fd, &st) != 0) return GRADD_FAIL(SHM, "cannot examine it: %s", strerror(errno));
    opened.device = st.st_dev;
    opened.inode = st.st_ino;
    if (opened.bytes != expect_bytes)
        return GRADD_FAIL(SHM, "the segment has %llu bytes, the message said %llu",
                          (unsigned long long)opened.bytes, (unsigned long long)expect_bytes);
    GRADD_TRY(gradd_segment_map(&opened));
    close(fd); /* the mapping keeps the memory: a session would hold hundreds of descriptors */
    opened.fd = -1;
    *out_segment = opened;
    return GRADD_OK;
}

gradd_status_t gradd_segment_borrow(const gradd_lent_t *lent, const gradd_mapper_t *mapper,
                                    gradd_segment_t *out_segment) {
    gradd_segment_t opened = {
        .fd = -1, .bytes = lent->bytes, .mapper = mapper, .memory = lent->memory};
    GRADD_TRY(check_claim(lent->bytes));
    if (!mapper || !mapper->open)
        return GRADD_FAIL(UNSUPPORTED, "this daemon's device has no memory of its own to share: "
                                       "send memory of the host, a memfd");
    GRADD_TRY(mapper->open(mapper->context, lent, &opened.base));
    *out_segment = opened;
    return GRADD_OK;
}

gradd_status_t gradd_segment_map(gradd_segment_t *segment) {
    void *base;
    if (segment->base) return GRADD_OK;
    if (segment->mapper)
        return segment->mapper->map(segment->mapper->context, segment->fd, segment->bytes,
                                    &segment->base);
    base = mmap(NULL, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd, 0);
    if (base == MAP_FAILED && errno == ENOMEM)
        return GRADD_FAIL(NOMEM, "no address space to map a segment of %llu bytes",
                          (unsigned long long)segment->bytes);
    if (base == MAP_FAILED) return GRADD_FAIL(SHM, "cannot map a segment: %s", strerror(errno));
    segment->base = base;
    return GRADD_OK;
}

void gradd_segment_unmap(gradd_segment_t *segment) {
    const gradd_mapper_t *mapper = segment->mapper;
    if (segment->base && segment->memory != GRADD_MEMORY_MEMFD)
        mapper->close(mapper->context, segment->memory, segment->base, segment->bytes);
    else if (segment->base && mapper)
        mapper->unmap(mapper->context, segment->base, segment->bytes);
    else if (segment->base)
        gradd_discard_mapping(segment->base, segment->bytes);
    segment->base = NULL;
}

void gradd_segment_finish(gradd_segment_t *segment) {
    if (!segment) return;
    gradd_segment_unmap(segment);
    /* A zeroed struct is accepted too, so descriptor 0 without a size is not ours to close. */
    if (segment->fd >= 0 && segment->bytes > 0) close(segment->fd);
    *segment = (gradd_segment_t)GRADD_SEGMENT_INIT;
}
