/* See confine.h. */
#include "server/host/confine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/host/confine_calls.h"
#include "server/host/log.h"

#define LATER_ENDS 200 /* more of oom_score_adj than the owner has */
#define MOST_SCORE 1000

#ifdef __SANITIZE_ADDRESS__ /* looks at its own threads at the end, by calls of its own */
#define CONFINES false
#else
#define CONFINES true
#endif

static void not_confined(const char *what) {
    log_event(LOG_WARN, "not_confined", "what=%s reason=\"%s\"", what, strerror(errno));
}

void confine_process(bool hidden, confined_t *confined) {
    const struct rlimit none = {0, 0};
    confined->no_privileges = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
    confined->no_core = setrlimit(RLIMIT_CORE, &none) == 0;
    confined->hidden = hidden && CONFINES && prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0;
}

void confine_end_first(void) {
    char text[16] = "0";
    const int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    const ssize_t n = read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    const long more = strtol(text, NULL, 10) + LATER_ENDS;
    const int bytes = snprintf(text, sizeof text, "%ld", more < MOST_SCORE ? more : MOST_SCORE);
    if (pwrite(fd, text, (size_t)bytes, 0) != bytes) not_confined("oom_score_adj");
    close(fd);
}

/* ---- paths ---- */

#define READS (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define WRITES                                                                                     \
    (LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_MAKE_REG)
#define MAKES                                                                                      \
    (READS | WRITES | LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_DIR |                 \
     LANDLOCK_ACCESS_FS_REMOVE_FILE)
/* Bits that headers of an older kernel lack. */
#define REFER    (1ull << 13)
#define TRUNCATE (1ull << 14)

static int landlock_version(void) {
    const long version =
        syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    return CONFINES && version > 0 ? (int)version : 0;
}

/* All accesses to files that this version knows; those that come later stay allowed. */
static uint64_t handled(int version) {
    uint64_t bits = (1ull << 13) - 1;
    if (version >= 2) bits |= REFER;
    if (version >= 3) bits |= TRUNCATE;
    return bits;
}

static bool allow(int rules, int fd, uint64_t access) {
    const struct landlock_path_beneath_attr rule = {.allowed_access = access, .parent_fd = fd};
    return syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0;
}

static bool allow_path(int rules, const char *path, int at, uint64_t access) {
    const int fd = openat(at, path, O_PATH | O_CLOEXEC);
    const bool done = fd >= 0 && allow(rules, fd, access);
    if (fd >= 0) close(fd);
    return done;
}

static bool allow_all(int rules, bool is_owner, int folder, uint64_t known) {
    if (!is_owner)
        return allow_path(rules, "/proc", AT_FDCWD, READS) &&
               allow_path(rules, "/sys", AT_FDCWD, READS) &&
               allow(rules, folder, (WRITES | TRUNCATE) & known);
    return allow_path(rules, "/", AT_FDCWD, READS | LANDLOCK_ACCESS_FS_EXECUTE) &&
           allow_path(rules, "/dev/null", AT_FDCWD,
                      LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE) &&
           /* its worker raises its own oom_score_adj */
           allow_path(rules, "/proc", AT_FDCWD,
                      READS | LANDLOCK_ACCESS_FS_WRITE_FILE | (TRUNCATE & known)) &&
           allow_path(rules, "..", folder, (MAKES | TRUNCATE) & known);
}

void confine_paths(bool is_owner, int folder, confined_t *confined) {
    const int version = landlock_version();
    const struct landlock_ruleset_attr attributes = {.handled_access_fs = handled(version)};
    if (!version) return;
    const int rules = (int)syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0);
    if (rules >= 0 && allow_all(rules, is_owner, folder, attributes.handled_access_fs) &&
        syscall(SYS_landlock_restrict_self, rules, 0) == 0)
        confined->landlock = version;
    else
        not_confined("landlock");
    if (rules >= 0) close(rules);
}

/* ---- system calls ---- */

void confine_calls(bool is_owner, confined_t *confined) {
    static struct sock_filter code[CONFINE_MAX_CODE];
    struct sock_fprog program = {.filter = code};
    if (!CONFINES) return;
    program.len = confine_code(is_owner, code);
    if (program.len == 0) return;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0)
        confined->seccomp = true;
    else
        not_confined("seccomp");
}

bool confine_is_done(confined_t *confined) {
    confined->seccomp = prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == SECCOMP_MODE_FILTER;
    confined->landlock = confined->seccomp ? landlock_version() : 0;
    return confined->seccomp;
}

/* ---- what is said ---- */

confined_t confine_offered(void) {
    static struct sock_filter code[CONFINE_MAX_CODE];
    const uint32_t action = SECCOMP_RET_ERRNO;
    return (confined_t){
        .no_privileges = true,
        .no_core = true,
        .hidden = CONFINES,
        .seccomp = CONFINES && confine_code(false, code) > 0 &&
                   syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0,
        .landlock = landlock_version(),
    };
}

const char *confine_text(const confined_t *confined, char text[CONFINE_TEXT_BYTES]) {
    const struct {
        bool is;
        const char *name;
    } parts[] = {
        {confined->seccomp,       "seccomp"          },
        {confined->no_privileges, "no new privileges"},
        {confined->hidden,        "not dumpable"     },
        {confined->no_core,       "no core"          },
    };
    int n = confined->landlock
                ? snprintf(text, CONFINE_TEXT_BYTES, "landlock %d", confined->landlock)
                : 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].is)
            n += snprintf(text + n, CONFINE_TEXT_BYTES - (size_t)n, "%s%s", n ? ", " : "",
                          parts[i].name);
    if (n == 0) snprintf(text, CONFINE_TEXT_BYTES, "nothing");
    return text;
}
