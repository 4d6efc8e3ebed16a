/* Tests of server/host/rundir: which process holds the lock, and whose sockets are removed. */
#include "server/host/rundir.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

static char base[64];

static const char *in_base(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", base, name);
    return path;
}

static void open_dir(rundir_t *dir, const char *path) {
    pid_t other;
    CHECK_OK(rundir_init(dir, path));
    CHECK_OK(rundir_prepare(dir));
    CHECK_OK(rundir_lock(dir, &other));
    CHECK_EQ_INT(other, 0);
}

/* As a daemon that starts: both sockets, listening. */
static void listen_both(rundir_t *dir, int fds[2]) {
    CHECK_OK(rundir_listen(dir, RUNDIR_COMMANDS, &fds[0]));
    CHECK_OK(rundir_listen(dir, RUNDIR_CONTROL, &fds[1]));
}

static bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

static void make_base(void) {
    strcpy(base, "/tmp/gradd-rundir-XXXXXX");
    CHECK(mkdtemp(base) != NULL);
}

static void remove_base(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", base);
    CHECK_EQ_INT(system(command), 0);
}

TEST(a_daemon_removes_its_sockets) {
    rundir_t dir;
    int fds[2];
    make_base();
    open_dir(&dir, base);
    CHECK(!rundir_is_reachable(&dir)); /* no sockets yet */
    listen_both(&dir, fds);
    CHECK(rundir_is_reachable(&dir) && rundir_is_locked(&dir));
    CHECK_EQ_INT(rundir_owner(&dir), getpid());
    rundir_unlink(&dir);
    CHECK(!exists(dir.cmd) && !exists(dir.ctl));
    CHECK(!rundir_is_reachable(&dir));
    rundir_finish(&dir);
    CHECK(!rundir_is_locked(&dir) && rundir_owner(&dir) == 0);
    remove_base();
}

static gradd_status_t note_path(const rundir_t *dir, void *context) {
    char *text = context;
    const char *slash = strrchr(dir->path, '/');
    strcat(text, slash);
    return strcmp(slash, "/GPU-a") ? GRADD_OK : GRADD_FAIL(IO, "no answer in %s", dir->path);
}

TEST(all_daemons_of_a_user_are_visited) {
    static const char *const names[] = {"GPU-b", "GPU-a", "old"};
    char seen[256] = "";
    rundir_t dirs[4];
    make_base();
    CHECK_OK(rundir_each_running(base, note_path, seen));
    CHECK_EQ_STR(seen, "");
    open_dir(&dirs[3], base);
    for (int i = 0; i < 3; i++)
        open_dir(&dirs[i], in_base(names[i]));
    rundir_finish(&dirs[2]); /* its daemon has ended */
    /* a failure is told, and does not end it */
    CHECK_STATUS(GRADD_E_IO, rundir_each_running(base, note_path, seen));
    CHECK_ERROR_HAS("no answer in");
    snprintf(seen + 128, 128, "%s/GPU-a/GPU-b", strrchr(base, '/'));
    CHECK_EQ_STR(seen, seen + 128);
    rundir_finish(&dirs[3]);
    seen[0] = 0;
    CHECK_STATUS(GRADD_E_IO, rundir_each_running(base, note_path, seen));
    CHECK_EQ_STR(seen, "/GPU-a/GPU-b");
    rundir_finish(&dirs[0]);
    rundir_finish(&dirs[1]);
    remove_base();
}

/* The directory is moved away and made anew by another daemon: the first removes its own sockets,
 * wherever they are now. */
TEST(sockets_of_a_later_daemon_stay) {
    rundir_t first, second;
    int fds[2];
    make_base();
    char place[96], moved[96];
    snprintf(place, sizeof place, "%.60s/run", base);
    snprintf(moved, sizeof moved, "%.60s/moved", base);
    open_dir(&first, place);
    listen_both(&first, fds);
    CHECK_EQ_INT(rename(place, moved), 0);
    CHECK(!rundir_is_reachable(&first));
    open_dir(&second, place);
    listen_both(&second, fds);
    CHECK(!rundir_is_reachable(&first) && rundir_is_reachable(&second));
    rundir_unlink(&first);
    CHECK(exists(second.cmd) && exists(second.ctl));
    CHECK(exists(in_base("moved/lock")) && !exists(in_base("moved/ctl.sock")));
    rundir_finish(&first);
    rundir_finish(&second);
    remove_base();
}

/* The same within one directory, emptied by a cleaner. */
TEST(a_directory_that_was_emptied_belongs_to_the_next) {
    rundir_t first, second;
    int fds[2];
    make_base();
    open_dir(&first, base);
    listen_both(&first, fds);
    CHECK_EQ_INT(unlink(in_base("lock")) | unlink(first.cmd) | unlink(first.ctl), 0);
    CHECK(!rundir_is_reachable(&first));
    open_dir(&second, base);
    listen_both(&second, fds);
    rundir_unlink(&first);
    CHECK(rundir_is_reachable(&second));
    rundir_finish(&first);
    rundir_finish(&second);
    remove_base();
}

/* Files that a cleaner removed are made anew, unless another daemon was faster. */
TEST(a_daemon_takes_its_place_again) {
    rundir_t dir;
    int fds[2];
    pid_t other;
    char place[96], moved[96];
    make_base();
    snprintf(place, sizeof place, "%.60s/run", base);
    snprintf(moved, sizeof moved, "%.60s/moved", base);
    open_dir(&dir, place);
    listen_both(&dir, fds);
    CHECK_EQ_INT(unlink(dir.ctl), 0);
    CHECK(!rundir_has(&dir, RUNDIR_CONTROL) && rundir_has(&dir, RUNDIR_COMMANDS));
    CHECK_OK(rundir_restore(&dir, &other)); /* the lock is there: nothing to do */
    CHECK_EQ_INT(other, 0);
    CHECK(!rundir_is_reachable(&dir));
    listen_both(&dir, fds);
    CHECK(rundir_is_reachable(&dir));
    CHECK_EQ_INT(unlink(dir.cmd), 0); /* another file in its place is not ours */
    CHECK_EQ_INT(close(open(dir.cmd, O_CREAT | O_RDWR, 0600)), 0);
    CHECK(!rundir_has(&dir, RUNDIR_COMMANDS) && !rundir_is_reachable(&dir));
    CHECK_EQ_INT(rename(place, moved), 0);
    CHECK(!rundir_exists(&dir));
    CHECK_OK(rundir_restore(&dir, &other));
    CHECK_EQ_INT(other, 0);
    CHECK(rundir_exists(&dir) && rundir_is_locked(&dir));
    listen_both(&dir, fds);
    CHECK(rundir_is_reachable(&dir));
    rundir_unlink(&dir);
    CHECK(!exists(dir.cmd) && !exists(dir.ctl));
    rundir_finish(&dir);
    remove_base();
}

TEST(a_place_that_was_taken_stays_taken) {
    rundir_t first, second;
    int fds[2];
    pid_t other;
    make_base();
    open_dir(&first, base);
    listen_both(&first, fds);
    CHECK_EQ_INT(unlink(in_base("lock")), 0);
    open_dir(&second, base);
    listen_both(&second, fds);
    CHECK_OK(rundir_restore(&first, &other));
    CHECK_EQ_INT(other, getpid());
    CHECK(first.lock >= 0 && !rundir_is_reachable(&first) && rundir_is_reachable(&second));
    rundir_finish(&first);
    rundir_finish(&second);
    remove_base();
}

/* A process that checks the lock holds it for a moment, and is not a daemon. */
TEST(a_short_lock_is_waited_for) {
    rundir_t dir;
    pid_t other;
    int ends[2];
    char go;
    make_base();
    CHECK_EQ_INT(close(open(in_base("lock"), O_CREAT | O_RDWR, 0600)), 0);
    CHECK_EQ_INT(pipe(ends), 0);
    pid_t asker = fork();
    if (asker == 0) {
        int fd = open(in_base("lock"), O_RDWR);
        bool locked = flock(fd, LOCK_EX) == 0;
        if (write(ends[1], "x", 1) != 1) _exit(1);
        usleep(5000);
        _exit(!locked);
    }
    CHECK_EQ_INT(read(ends[0], &go, 1), 1);
    CHECK_OK(rundir_init(&dir, base));
    CHECK_OK(rundir_prepare(&dir));
    CHECK_OK(rundir_lock(&dir, &other));
    CHECK_EQ_INT(other, 0);
    CHECK(rundir_is_locked(&dir));
    rundir_finish(&dir);
    int status;
    CHECK_EQ_INT(waitpid(asker, &status, 0), asker);
    CHECK_EQ_INT(status, 0);
    remove_base();
}

TEST(a_daemon_that_stays_is_named) {
    rundir_t dir;
    pid_t other = 0;
    make_base();
    int fd = open(in_base("lock"), O_CREAT | O_RDWR, 0600);
    CHECK_EQ_INT(flock(fd, LOCK_EX), 0);
    CHECK_EQ_INT(write(fd, "4711\n", 5), 5);
    CHECK_OK(rundir_init(&dir, base));
    CHECK_OK(rundir_prepare(&dir));
    CHECK_OK(rundir_lock(&dir, &other));
    CHECK_EQ_INT(other, 4711);
    CHECK_EQ_INT(dir.lock, -1);
    rundir_finish(&dir);
    close(fd);
    remove_base();
}
