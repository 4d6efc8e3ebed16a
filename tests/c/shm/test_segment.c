/* Tests of shm/segment: what a hostile or careless owner of a descriptor may try.
 *
 * ENOSPC is injected with a seccomp filter on fallocate, because memory files have no size limit
 * that a test could reach safely.
 */
#include "tests/c/descriptors.h"
#include "tests/test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm/discard.h"
#include "shm/segment.h"

enum { SIZE = 1 << 16, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

/* A memfd with chosen size, reserved bytes and seals. */
static int make_memfd(off_t size, off_t reserved, int seals, unsigned flags) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    CHECK(fd >= 0);
    CHECK_EQ_INT(ftruncate(fd, size), 0);
    if (reserved) CHECK_EQ_INT(posix_fallocate(fd, 0, reserved), 0);
    if (seals) CHECK_EQ_INT(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void check_refused(int fd, gradd_status_t code, const char *reason) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    bool was_open = fcntl(fd, F_GETFD) >= 0;
    CHECK_STATUS(code, gradd_segment_open(fd, SIZE, NULL, &segment));
    CHECK_ERROR_HAS(reason);
    CHECK_EQ_INT(segment.fd, -1);
    CHECK_EQ_INT(fcntl(fd, F_GETFD) >= 0, was_open); /* still the caller's */
}

TEST(create_open_share_bytes) {
    gradd_segment_t mine = GRADD_SEGMENT_INIT, theirs = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", SIZE, &mine));
    CHECK_EQ_INT(mine.bytes, SIZE);
    CHECK_EQ_INT((uintptr_t)mine.base % 4096, 0);
    CHECK_OK(gradd_segment_open(dup(mine.fd), SIZE, NULL, &theirs));
    CHECK(theirs.base != mine.base);
    strcpy((char *)mine.base + SIZE - 16, "hello");
    CHECK_EQ_STR((char *)theirs.base + SIZE - 16, "hello");
    strcpy(theirs.base, "answer");
    CHECK_EQ_STR(mine.base, "answer");
    gradd_segment_finish(&theirs);
    CHECK_EQ_STR(mine.base, "answer");
    gradd_segment_finish(&mine);
    CHECK_EQ_INT(mine.fd, -1);
}

TEST(size_need_not_be_whole_pages) {
    gradd_segment_t odd = GRADD_SEGMENT_INIT;
    uint64_t bytes = 0;
    CHECK_OK(gradd_segment_create("odd", 4097, &odd));
    CHECK_OK(gradd_segment_check(odd.fd, &bytes));
    CHECK_EQ_INT(bytes, 4097);
    ((char *)odd.base)[4096] = 1;
    gradd_segment_finish(&odd);
}

/* Whether nothing is mapped there, by a page of each MiB. */
static bool is_unmapped(char *base, uint64_t bytes) {
    unsigned char in_core;
    for (uint64_t at = 0; at < bytes; at += (uint64_t)1 << 20)
        if (mincore(base + at, 1, &in_core) == 0) return false;
    return true;
}

/* More of them than the thread has places for: what it has no place for is unmapped at once. */
TEST(much_memory_is_given_back_by_a_thread) {
    enum { N = 70 };
    const uint64_t bytes = ((uint64_t)32 << 20) + 5;
    static gradd_segment_t mapped[N];
    char *base[N];
    gradd_segment_t first = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("much", bytes, &first));
    for (int i = 0; i < N; i++) {
        CHECK_OK(gradd_segment_open(dup(first.fd), bytes, NULL, &mapped[i]));
        base[i] = mapped[i].base;
        base[i][bytes - 1] = (char)i;
    }
    CHECK_EQ_INT(((char *)first.base)[bytes - 1], N - 1); /* all of them are one file */
    for (int i = 0; i < N; i++) {
        gradd_segment_finish(&mapped[i]);
        CHECK(mapped[i].base == NULL);
    }
    for (int i = 0; i < N; i++)
        while (!is_unmapped(base[i], bytes))
            usleep(1000);
    const int fd = dup(first.fd), before = fcntl(fd, F_GETFD);
    CHECK(before >= 0);
    gradd_segment_finish(&first);
    gradd_discard(fd);
    while (fcntl(fd, F_GETFD) >= 0)
        usleep(1000);
}

TEST(owner_cannot_change_the_size) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", SIZE, &segment));
    CHECK_EQ_INT(ftruncate(segment.fd, 0), -1);
    CHECK_EQ_INT(errno, EPERM);
    CHECK_EQ_INT(ftruncate(segment.fd, 2 * SIZE), -1);
    CHECK_EQ_INT(fallocate(segment.fd, 0, SIZE, SIZE), -1);
    memset(segment.base, 1, SIZE); /* would be SIGBUS had it worked */
    gradd_segment_finish(&segment);
}

TEST(unsealed_and_half_sealed_are_refused) {
    const int all[] = {0, F_SEAL_SHRINK, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_SHRINK | F_SEAL_SEAL,
                       F_SEAL_GROW | F_SEAL_SEAL};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        int fd = make_memfd(SIZE, SIZE, all[i], 0);
        check_refused(fd, GRADD_E_SHM, "sealed");
        close(fd);
    }
}

TEST(named_shared_memory_is_refused) {
    char name[64];
    snprintf(name, sizeof name, "/gradd-test-%d", (int)getpid());
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) test_skip("shm_open: %s", strerror(errno));
    shm_unlink(name);
    CHECK_EQ_INT(ftruncate(fd, SIZE), 0);
    check_refused(fd, GRADD_E_SHM, "cannot be sealed");
}

TEST(other_descriptors_are_refused) {
    int pipes[2];
    CHECK_EQ_INT(pipe(pipes), 0);
    check_refused(pipes[0], GRADD_E_SHM, "reading and writing");
    check_refused(open("/dev/zero", O_RDWR), GRADD_E_SHM, "not a memfd");
    check_refused(open("/tmp", O_RDONLY | O_DIRECTORY), GRADD_E_SHM, "reading and writing");
    check_refused(open("/tmp", O_TMPFILE | O_RDWR, 0600), GRADD_E_SHM, "");
    check_refused(-1, GRADD_E_SHM, "not an open descriptor");
    check_refused(99999, GRADD_E_SHM, "not an open descriptor");
}

TEST(read_only_is_refused) {
    char path[64];
    int fd = make_memfd(SIZE, SIZE, SEALS, 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    check_refused(open(path, O_RDONLY), GRADD_E_SHM, "reading and writing");
    check_refused(open(path, O_PATH | O_RDWR), GRADD_E_SHM, "reading and writing");
    check_refused(make_memfd(SIZE, SIZE, SEALS | F_SEAL_WRITE, 0), GRADD_E_SHM, "writing");
    check_refused(make_memfd(SIZE, SIZE, SEALS | F_SEAL_FUTURE_WRITE, 0), GRADD_E_SHM, "writing");
}

TEST(claimed_size_must_be_the_real_one) {
    const uint64_t claims[] = {0, SIZE - 1, SIZE + 1, 2 * SIZE, UINT64_MAX};
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    int fd = make_memfd(SIZE, SIZE, SEALS, 0);
    for (size_t i = 0; i < sizeof claims / sizeof claims[0]; i++) {
        CHECK_STATUS(GRADD_E_SHM, gradd_segment_open(fd, claims[i], NULL, &segment));
        CHECK_ERROR_HAS("65536 bytes, the message said");
    }
    CHECK_OK(gradd_segment_open(fd, SIZE, NULL, &segment));
    gradd_segment_finish(&segment);
}

TEST(empty_is_refused) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    uint64_t bytes;
    int fd = make_memfd(0, 0, SEALS, 0);
    CHECK_STATUS(GRADD_E_LIMIT, gradd_segment_check(fd, &bytes));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_segment_create("empty", 0, &segment));
}

TEST(unreserved_pages_are_refused) {
    check_refused(make_memfd(SIZE, 0, SEALS, 0), GRADD_E_NOSPC, "posix_fallocate");
    check_refused(make_memfd(SIZE, SIZE / 2, SEALS, 0), GRADD_E_NOSPC, "only 32768");
}

TEST(huge_pages_are_refused) {
    int fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd < 0) test_skip("no hugetlb memfd here: %s", strerror(errno));
    check_refused(fd, GRADD_E_SHM, "huge pages");
}

TEST(impossible_sizes_fail_without_harm) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    int before = open_descriptors();
    CHECK_STATUS(GRADD_E_LIMIT, gradd_segment_create("x", UINT64_MAX, &segment));
    CHECK_STATUS(GRADD_E_LIMIT, gradd_segment_create("x", (uint64_t)INT64_MAX + 1, &segment));
    CHECK_STATUS(GRADD_E_NOSPC, gradd_segment_create("x", INT64_MAX, &segment));
    CHECK_STATUS(GRADD_E_NOSPC, gradd_segment_create("x", 1ull << 50, &segment));
    CHECK_EQ_INT(open_descriptors(), before);
    CHECK(segment.base == NULL);
}

/* From here on the given system call fails with the given error in this process, if its second
 * argument (the length of an mmap) is `length`; whatever it is when length is 0. */
static void fail_syscall(unsigned number, unsigned error, unsigned length) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | (length ? BPF_JEQ : BPF_JGE) | BPF_K, length, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        test_skip("no seccomp filters here: %s", strerror(errno));
}

static void check_create_fails(unsigned number, unsigned error, gradd_status_t code) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    int before = open_descriptors();
    fail_syscall(number, error, 0);
    CHECK_STATUS(code, gradd_segment_create("x", SIZE, &segment));
    CHECK_EQ_INT(segment.fd, -1);
    CHECK_EQ_INT(open_descriptors(), before);
}

TEST(no_space_is_said_at_creation) {
    check_create_fails(SYS_fallocate, ENOSPC, GRADD_E_NOSPC);
}

TEST(no_address_space_is_said_at_mapping) {
    gradd_segment_t segment = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("x", 17 * SIZE, &segment));
    gradd_segment_unmap(&segment);
    CHECK(segment.base == NULL && segment.fd >= 0);
    fail_syscall(SYS_mmap, ENOMEM, 17 * SIZE);
    CHECK_STATUS(GRADD_E_NOMEM, gradd_segment_map(&segment));
    gradd_segment_finish(&segment);
}

TEST(no_memfd_is_said) {
    check_create_fails(SYS_memfd_create, EMFILE, GRADD_E_SHM);
}

TEST(nothing_leaks) {
    int before = open_descriptors();
    for (int i = 0; i < 200; i++) {
        gradd_segment_t a = GRADD_SEGMENT_INIT, b = GRADD_SEGMENT_INIT;
        CHECK_OK(gradd_segment_create("leak", SIZE, &a));
        CHECK_OK(gradd_segment_open(dup(a.fd), SIZE, NULL, &b));
        gradd_segment_finish(&a);
        gradd_segment_finish(&b);
        gradd_segment_finish(&b);
    }
    gradd_segment_finish(NULL);
    gradd_segment_t zeroed;
    memset(&zeroed, 0, sizeof zeroed);
    gradd_segment_finish(&zeroed); /* must not close descriptor 0 */
    CHECK_EQ_INT(open_descriptors(), before);
}

TEST(contents_outlive_their_creator) {
    gradd_segment_t mine = GRADD_SEGMENT_INIT;
    CHECK_OK(gradd_segment_create("test", SIZE, &mine));
    pid_t child = fork();
    if (child == 0) {
        strcpy(mine.base, "from the child");
        kill(getpid(), SIGKILL);
    }
    CHECK_EQ_INT(waitpid(child, NULL, 0), child);
    CHECK_EQ_STR(mine.base, "from the child");
    gradd_segment_finish(&mine);
}

TEST(a_base_can_be_written_by_none) {
    gradd_segment_t one = GRADD_SEGMENT_INIT, other = GRADD_SEGMENT_INIT;
    const int fd = make_memfd(SIZE, SIZE, 0, 0);
    CHECK_EQ_INT(pwrite(fd, "base", 5, 100), 5);
    CHECK_EQ_INT(fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_WRITE | F_SEAL_FUTURE_WRITE), 0);
    check_refused(fd, GRADD_E_SHM, "sealed against writing"); /* as a segment */
    CHECK_OK(gradd_segment_open_base(dup(fd), SIZE, &one));
    CHECK_OK(gradd_segment_open_base(dup(fd), SIZE, &other));
    strcpy((char *)one.base + 100, "mine");
    CHECK_EQ_STR((char *)other.base + 100, "base");
    CHECK(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK_EQ_INT(pwrite(fd, "x", 1, 0), -1);
    gradd_segment_finish(&one);
    gradd_segment_finish(&other);
    close(fd);
}

TEST(no_base_that_another_could_change) {
    uint64_t bytes;
    const int seals[] = {0, SEALS, SEALS | F_SEAL_FUTURE_WRITE, F_SEAL_WRITE};
    for (int i = 0; i < 4; i++) {
        const int fd = make_memfd(SIZE, SIZE, seals[i], 0);
        CHECK_STATUS(GRADD_E_SHM, gradd_segment_check_base(fd, &bytes));
        CHECK_ERROR_HAS("sealed against");
        close(fd);
    }
    gradd_segment_t base = GRADD_SEGMENT_INIT;
    const int fd = make_memfd(SIZE, SIZE, SEALS | F_SEAL_WRITE, 0);
    CHECK_STATUS(GRADD_E_SHM, gradd_segment_open_base(fd, 2 * SIZE, &base));
    CHECK_ERROR_HAS("the message said");
    CHECK_EQ_INT(base.fd, -1);
    close(fd);
}

TEST(memory_that_is_discarded_is_back_after_the_wait) {
    enum { N = 3 };
    const size_t bytes = (size_t)40 << 20;
    char *memory[N];
    unsigned char present;
    for (int i = 0; i < N; i++) {
        memory[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory[i] != MAP_FAILED);
        for (size_t at = 0; at < bytes; at += 4096)
            memory[i][at] = 1;
    }
    for (int i = 0; i < N; i++)
        gradd_discard_mapping(memory[i], bytes);
    gradd_discard_wait();
    for (int i = 0; i < N; i++)
        for (size_t at = 0; at < bytes; at += 4096)
            CHECK(mincore(memory[i] + at, 4096, &present) != 0 && errno == ENOMEM);
    gradd_discard_wait(); /* there is nothing to wait for */
}
