/* See confine_calls.h.
 *
 * A call that is allowed whatever its arguments costs nothing: the kernel keeps a bitmap of these
 * (Linux 5.11). A few are looked at: sockets of other families than Unix, processes in namespaces
 * of their own, devices. clone3 hides its flags in memory, so it does not exist; glibc takes clone
 * then.
 */
#include "server/host/confine_calls.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MACHINE AUDIT_ARCH_AARCH64
#else
#define MACHINE 0
#endif

#define NAMESPACES                                                                                 \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID |  \
     CLONE_NEWNET)

/* Of both: what runs already needs them. */
static const int common[] = {
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_pwrite64,
    SYS_lseek,
    SYS_close,
    SYS_close_range,
    SYS_fcntl,
    SYS_dup,
    SYS_dup3,
    SYS_fstat,
    SYS_fstatfs,
    SYS_newfstatat,
    SYS_statx,
    SYS_openat,
    SYS_unlinkat,
    SYS_readlinkat,
    SYS_ftruncate,
    SYS_fallocate,
    SYS_pipe2,
    /* memory */
    SYS_mmap,
    SYS_munmap,
    SYS_mprotect,
    SYS_mremap,
    SYS_madvise,
    SYS_mincore,
    SYS_brk,
    SYS_memfd_create,
    SYS_membarrier,
    SYS_mlock,
    SYS_munlock,
    /* waiting */
    SYS_ppoll,
    SYS_pselect6,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_eventfd2,
    SYS_signalfd4,
    SYS_timerfd_create,
    SYS_timerfd_settime,
    SYS_timerfd_gettime,
    SYS_nanosleep,
    SYS_clock_nanosleep,
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_gettimeofday,
    SYS_futex,
    SYS_restart_syscall,
    /* sockets that are there, and pairs */
    SYS_accept,
    SYS_accept4,
    SYS_sendto,
    SYS_recvfrom,
    SYS_sendmsg,
    SYS_recvmsg,
    SYS_shutdown,
    SYS_getsockopt,
    SYS_setsockopt,
    SYS_getsockname,
    SYS_getpeername,
    /* threads and signals of our own */
    SYS_set_robust_list,
    SYS_get_robust_list,
    SYS_rseq,
    SYS_gettid,
    SYS_getpid,
    SYS_getppid,
    SYS_tgkill,
    SYS_tkill,
    SYS_exit,
    SYS_exit_group,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigtimedwait,
    SYS_sigaltstack,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_sched_setaffinity,
    SYS_sched_getparam,
    SYS_sched_setscheduler,
    SYS_sched_getscheduler,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_prctl,
    SYS_prlimit64,
    SYS_getrlimit,
    SYS_getrusage,
    SYS_sysinfo,
    SYS_uname,
    SYS_getrandom,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_getcpu,
    SYS_times,
#ifdef __x86_64__
    SYS_poll,
    SYS_select,
    SYS_epoll_wait,
    SYS_stat,
    SYS_lstat,
    SYS_open,
    SYS_access,
    SYS_readlink,
    SYS_unlink,
    SYS_dup2,
    SYS_time,
    SYS_arch_prctl,
#endif
};

/* Of the owner: the folder, and a worker that starts, which gives them up itself. */
static const int more[] = {
    SYS_execve,
    SYS_execveat,
    SYS_wait4,
    SYS_waitid,
    SYS_kill,
    SYS_pidfd_open,
    SYS_pidfd_send_signal,
    SYS_bind,
    SYS_listen,
    SYS_connect,
    SYS_mkdirat,
    SYS_umask,
    SYS_flock,
    SYS_getdents64,
    SYS_getcwd,
    SYS_set_tid_address,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_setrlimit,
    SYS_setpriority,
    SYS_getpriority,
    SYS_seccomp,
    SYS_landlock_create_ruleset,
    SYS_landlock_add_rule,
    SYS_landlock_restrict_self,
    SYS_fadvise64,
    SYS_fsync,
    SYS_statfs,
    SYS_setsid,
    SYS_getpgid,
    SYS_getsid,
    SYS_set_mempolicy,
    SYS_get_mempolicy,
#ifdef __x86_64__
    SYS_mkdir,
    SYS_vfork,
    SYS_fork,
    SYS_getpgrp,
#endif
};

typedef struct writer_s {
    struct sock_filter *code;
    unsigned short n;
} writer_t;

static void put(writer_t *w, struct sock_filter instruction) {
    w->code[w->n++] = instruction;
}

static void put_return(writer_t *w, uint32_t action) {
    put(w, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
}

static void load(writer_t *w, size_t offset) {
    put(w, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset));
}

/* Skips so many instructions unless the value is k. */
static void unless(writer_t *w, uint32_t k, uint8_t n) {
    put(w, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, k, 0, n));
}

static void allow(writer_t *w, int number) {
    unless(w, (uint32_t)number, 1);
    put_return(w, SECCOMP_RET_ALLOW);
}

static void allow_list(writer_t *w, const int *numbers, size_t n) {
    for (size_t i = 0; i < n; i++)
        allow(w, numbers[i]);
}

/* The lower half of an argument, on a little-endian machine. */
static size_t argument(int i) {
    return offsetof(struct seccomp_data, args) + 8u * (unsigned)i;
}

/* Allows a call where an argument is one of two values. */
static void allow_with(writer_t *w, int number, int i, const uint32_t values[2]) {
    unless(w, (uint32_t)number, 6);
    load(w, argument(i));
    for (int k = 0; k < 2; k++) {
        unless(w, values[k], 1);
        put_return(w, SECCOMP_RET_ALLOW);
    }
    put_return(w, SECCOMP_RET_ERRNO | EPERM);
}

static void allow_clone(writer_t *w) {
    unless(w, SYS_clone, 4);
    load(w, argument(0));
    put(w, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NAMESPACES, 1, 0));
    put_return(w, SECCOMP_RET_ALLOW);
    put_return(w, SECCOMP_RET_ERRNO | EPERM);
}

unsigned short confine_code(bool is_owner, struct sock_filter code[CONFINE_MAX_CODE]) {
    writer_t w = {.code = code};
    if (!MACHINE) return 0;
    load(&w, offsetof(struct seccomp_data, arch));
    unless(&w, MACHINE, 0);
    w.code[w.n - 1].jt = 1; /* else: another machine's numbers */
    put_return(&w, SECCOMP_RET_KILL_PROCESS);
    load(&w, offsetof(struct seccomp_data, nr));
    allow_list(&w, common, sizeof common / sizeof *common);
    if (is_owner) allow_list(&w, more, sizeof more / sizeof *more);
    allow_with(&w, SYS_socket, 0, (const uint32_t[2]){AF_UNIX, AF_UNIX});
    load(&w, offsetof(struct seccomp_data, nr));
    allow_with(&w, SYS_socketpair, 0, (const uint32_t[2]){AF_UNIX, AF_UNIX});
    load(&w, offsetof(struct seccomp_data, nr));
    allow_with(&w, SYS_ioctl, 1, (const uint32_t[2]){TCGETS, FIONBIO});
    load(&w, offsetof(struct seccomp_data, nr));
    allow_clone(&w);
    load(&w, offsetof(struct seccomp_data, nr));
    unless(&w, SYS_clone3, 1);
    put_return(&w, SECCOMP_RET_ERRNO | ENOSYS);
    put_return(&w, SECCOMP_RET_ERRNO | EPERM);
    return w.n;
}
