/* See process.h. */
#include "server/owner/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/session/link.h"

/* In the child: descriptors at their numbers, without close-on-exec. The sources may lie at the
 * targets, so they move out of the way first. */
static int place(int link, int lock) {
    const int above = LINK_DESCRIPTOR + LOCK_DESCRIPTOR;
    const int a = fcntl(link, F_DUPFD_CLOEXEC, above), b = fcntl(lock, F_DUPFD_CLOEXEC, above);
    return a >= 0 && b >= 0 && dup2(a, LINK_DESCRIPTOR) >= 0 && dup2(b, LOCK_DESCRIPTOR) >= 0;
}

static _Noreturn void become_worker(char *const *argv, pid_t owner, int link, int lock) {
    /* A copy of this binary, also where a newer one has taken its name. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == owner && place(link, lock))
        execv("/proc/self/exe", argv);
    _exit(127);
}

gradd_status_t process_start(char *const *argv, int lock, worker_process_t *out_process) {
    int ends[2];
    const pid_t owner = getpid();
    GRADD_TRY(link_create(ends));
    const pid_t pid = fork();
    if (pid == 0) become_worker(argv, owner, ends[1], lock);
    const int error = errno;
    close(ends[1]);
    const int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (pidfd >= 0) {
        *out_process = (worker_process_t){pid, pidfd, ends[0]};
        return GRADD_OK;
    }
    close(ends[0]);
    if (pid < 0) return GRADD_FAIL(IO, "fork: %s", strerror(error));
    const gradd_status_t st = GRADD_FAIL(IO, "pidfd_open: %s", strerror(errno));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return st;
}

int process_reap(worker_process_t *process) {
    int status = 0;
    while (waitpid(process->pid, &status, 0) < 0 && errno == EINTR)
        ;
    close(process->pidfd);
    close(process->link);
    *process = (worker_process_t){0, -1, -1};
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
