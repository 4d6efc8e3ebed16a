/* See account.h. */
#include "server/users/account.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/keyctl.h>
#include <pwd.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FAILED    126
#define IDLE_EXIT "GRADD_IDLE_EXIT=600" /* as a daemon that a trainer starts */

gradd_status_t account_group(const char *name, gid_t *out_group) {
    char *end;
    errno = 0;
    const unsigned long number = strtoul(name, &end, 10);
    const struct group *group = getgrnam(name);
    const bool is_number = name[0] >= '0' && name[0] <= '9' && !*end && !errno;
    if (!group && !(is_number && number < UINT_MAX))
        return GRADD_FAIL(UNSUPPORTED, "--allow-group: there is no group '%.60s'", name);
    *out_group = group ? group->gr_gid : (gid_t)number;
    return GRADD_OK;
}

static gradd_status_t check_member(int socket, const struct ucred *peer, gid_t group) {
    static gid_t groups[NGROUPS_MAX];
    socklen_t bytes = sizeof groups;
    if (peer->uid == 0 || peer->gid == group) return GRADD_OK;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0)
        return GRADD_FAIL(IO, "SO_PEERGROUPS: %s", strerror(errno));
    for (size_t i = 0; i < bytes / sizeof *groups; i++)
        if (groups[i] == group) return GRADD_OK;
    return GRADD_FAIL(SESSION, "uid %u is not in group %u, which may use this directory",
                      (unsigned)peer->uid, (unsigned)group);
}

gradd_status_t account_of(int socket, gid_t group, account_t *out_account) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0)
        return GRADD_FAIL(IO, "SO_PEERCRED: %s", strerror(errno));
    if (peer.uid == (uid_t)-1 || peer.gid == (gid_t)-1) /* of no user here: -1 changes nothing */
        return GRADD_FAIL(SESSION, "the peer has no uid");
    GRADD_TRY(check_member(socket, &peer, group));
    *out_account = (account_t){peer.uid, peer.gid};
    return GRADD_OK;
}

gradd_status_t account_check(const account_t *account) {
    if (getpwuid(account->uid)) return GRADD_OK;
    return GRADD_FAIL(SESSION, "uid %u is not a user of this machine", (unsigned)account->uid);
}

/* ---- in the child ---- */

/* What root's session has in the kernel: keys, and descriptors that a shell has left open. */
static bool leave_session(void) {
    syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL); /* where there are keys */
    return setsid() >= 0 && close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC) == 0;
}

static bool give_up_root(const account_t *account, gid_t group) {
    const uid_t uid = account->uid;
    const gid_t gid = account->gid;
    if (setgroups(1, &group) != 0 || setresgid(gid, gid, gid) != 0 ||
        setresuid(uid, uid, uid) != 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return false;
    return uid == 0 || setresuid((uid_t)-1, 0, (uid_t)-1) != 0; /* there is no way back */
}

/* As the user: what lies in the folder is the user's. */
static bool open_log(const char *folder) {
    char path[PATH_MAX];
    const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    snprintf(path, sizeof path, "%s/daemon.log", folder);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    const int log = open(path, flags, 0600);
    const int out = log >= 0 ? log : null;
    return null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
           dup2(out, STDERR_FILENO) >= 0;
}

static size_t count(char *const *words) {
    size_t n = 0;
    while (words[n])
        n++;
    return n;
}

/* argv as the daemon's of that folder: of two options the last one counts. */
static char **own_words(char *const *argv, const char *folder) {
    const size_t n = count(argv);
    char **words = calloc(n + 4, sizeof *words);
    if (!words) return NULL;
    memcpy(words, argv, n * sizeof *words);
    words[n] = "--dir";
    words[n + 1] = (char *)folder;
    words[n + 2] = "--allow-group=";
    return words;
}

/* Root's own environment is not for users to read. */
static char **own_environment(void) {
    static const char *const kept[] = {"GRADD_", "GOMP_", "OMP_",
                                       "DNNL_",  "PATH=", "LD_LIBRARY_PATH="};
    char **entries = calloc(count(environ) + 2, sizeof *entries);
    int n = 0;
    if (!entries) return NULL;
    if (!getenv("GRADD_IDLE_EXIT")) entries[n++] = (char *)IDLE_EXIT;
    for (char **entry = environ; *entry; entry++)
        for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
            if (!strncmp(*entry, kept[i], strlen(kept[i]))) {
                entries[n++] = *entry;
                break;
            }
    return entries;
}

_Noreturn void account_become(const account_t *account, gid_t group, char *const *argv,
                              const char *folder) {
    char **words = own_words(argv, folder), **entries = own_environment();
    if (words && entries && leave_session() && give_up_root(account, group) && chdir("/") == 0 &&
        open_log(folder))
        execve("/proc/self/exe", words, entries);
    _exit(FAILED);
}
