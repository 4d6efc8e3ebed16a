/* What a process can do that has given things up: each test is a process of its own.
 */
#include "server/host/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/test.h"

#ifndef __SANITIZE_ADDRESS__

static bool can_open(int at, const char *path, int flags) {
    const int fd = openat(at, path, flags | O_CLOEXEC, 0600);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

static void *add_one(void *number) {
    ++*(int *)number;
    return NULL;
}

TEST(a_worker_has_its_folder_and_no_other_path) {
    char path[] = "/tmp/gradd-confine-XXXXXX", file[64];
    confined_t confined = {0};
    if (!confine_offered().landlock) test_skip("no Landlock here");
    CHECK(mkdtemp(path) != NULL);
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    confine_process(true, &confined);
    confine_paths(false, folder, &confined);
    CHECK(confined.landlock > 0);
    CHECK(can_open(folder, "lost", O_WRONLY | O_CREAT | O_TRUNC));
    CHECK(can_open(folder, "lost", O_RDONLY));
    CHECK(can_open(AT_FDCWD, "/proc/meminfo", O_RDONLY));
    CHECK(!can_open(AT_FDCWD, "/etc/passwd", O_RDONLY) && errno == EACCES);
    CHECK(!can_open(AT_FDCWD, "/tmp/gradd-confine", O_WRONLY | O_CREAT) && errno == EACCES);
    snprintf(file, sizeof file, "%s/lost", path);
    CHECK(unlink(file) != 0 && errno == EACCES);
    CHECK(truncate("/proc/self/comm", 0) != 0);
}

TEST(calls_that_a_worker_never_makes_fail) {
    confined_t confined = {0};
    char *const argv[] = {"true", NULL};
    pthread_t thread;
    int number = 1, ends[2];
    if (!confine_offered().seccomp) test_skip("no seccomp here");
    confine_process(true, &confined);
    confine_calls(false, &confined);
    CHECK(confined.seccomp);
    CHECK(execv("/bin/true", argv) != 0 && errno == EPERM);
    CHECK(socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM);
    CHECK(socket(AF_NETLINK, SOCK_RAW, 0) < 0 && errno == EPERM);
    CHECK(ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0 && errno == EPERM);
    CHECK(unshare(CLONE_NEWUSER) != 0 && errno == EPERM);
    CHECK(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0) < 0 && errno == EPERM);
    CHECK(syscall(SYS_clone3, NULL, 0) < 0 && errno == ENOSYS);
    CHECK(syscall(SYS_process_vm_readv, getpid(), NULL, 0, NULL, 0, 0) < 0 && errno == EPERM);
    CHECK(syscall(SYS_bpf, 0, NULL, 0) < 0 && errno == EPERM);
    CHECK(kill(getppid(), 0) != 0 && errno == EPERM);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(pthread_create(&thread, NULL, add_one, &number) == 0); /* by clone */
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQ_INT(number, 2);
}

TEST(threads_that_run_already_are_confined_too) {
    confined_t confined = {0};
    if (!confine_offered().seccomp) test_skip("no seccomp here");
#pragma omp parallel num_threads(2)
    {
    }
    confine_process(true, &confined);
    confine_calls(false, &confined);
    int n_refused = 0;
#pragma omp parallel num_threads(2) reduction(+ : n_refused)
    n_refused += socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM;
    CHECK_EQ_INT(n_refused, 2);
}

#endif

TEST(an_owner_may_start_a_worker) {
    confined_t confined = {0};
    const int folder = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    confine_process(true, &confined);
    confine_paths(true, folder, &confined);
    confine_calls(true, &confined);
    const confined_t offered = confine_offered();
    CHECK_EQ_INT(confined.landlock, offered.landlock);
    CHECK_EQ_INT(confined.seccomp, offered.seccomp);
    CHECK_EQ_INT(system("exit 7") >> 8, 7);
    CHECK(!offered.seccomp || (socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM));
    CHECK_EQ_INT(confine_is_done(&confined), offered.seccomp);
}

TEST(what_is_in_force_is_said) {
    char text[CONFINE_TEXT_BYTES];
    confined_t confined = {0};
    CHECK(!strcmp(confine_text(&confined, text), "nothing"));
    confined = (confined_t){true, true, true, true, 7};
    CHECK(!strcmp(confine_text(&confined, text),
                  "landlock 7, seccomp, no new privileges, not dumpable, no core"));
    struct rlimit core;
    confined = (confined_t){0};
    confine_process(false, &confined);
    CHECK(!strcmp(confine_text(&confined, text), "no new privileges, no core"));
    CHECK(getrlimit(RLIMIT_CORE, &core) == 0 && core.rlim_max == 0);
}
