/* Tests of server/host/shared_dir: which directories users may share, and whose folders are in it.
 */
#include "server/host/shared_dir.h"

#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

#define GROUP 5
#define USER  1

static char base[64], place[80];

static void begin(void) {
    if (geteuid() != 0) test_skip("only root can make directories of other users");
    strcpy(base, "/tmp/gradd-shared-XXXXXX");
    CHECK(mkdtemp(base) != NULL);
    if (chown(base, USER, GROUP) != 0) test_skip("root is alone in this namespace");
    CHECK_EQ_INT(chown(base, 0, 0), 0);
    CHECK_EQ_INT(chmod(base, 0755), 0);
    snprintf(place, sizeof place, "%s/run", base);
}

static void end(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", base);
    CHECK_EQ_INT(system(command), 0);
}

/* The directory at `place`, as the supervisor has it. */
static void prepare(rundir_t *dir) {
    CHECK_OK(shared_dir_init(dir, place));
    CHECK_OK(shared_dir_prepare(dir, GROUP));
}

static int listen_in(rundir_t *dir) {
    pid_t other;
    int fd;
    CHECK_OK(rundir_lock(dir, &other));
    CHECK_EQ_INT(other, 0);
    CHECK_OK(rundir_listen_for(dir, RUNDIR_CONTROL, GROUP, &fd));
    return fd;
}

static struct stat look(const char *name) {
    char path[128];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", place, name);
    CHECK_EQ_INT(lstat(path, &st), 0);
    return st;
}

/* What `check` returns in a child that is another user's. */
static bool as_user(uid_t uid, gid_t group, bool (*check)(void)) {
    int status;
    const pid_t pid = fork();
    if (pid == 0) {
        const bool other = setgroups(1, &group) == 0 && setresgid(uid, uid, uid) == 0 &&
                           setresuid(uid, uid, uid) == 0;
        _exit(other ? !check() : 2);
    }
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 2);
    return WEXITSTATUS(status) == 0;
}

TEST(it_is_made_for_a_group_alone) {
    rundir_t dir;
    begin();
    prepare(&dir);
    struct stat st = look("");
    CHECK_EQ_INT(st.st_uid, 0);
    CHECK_EQ_INT(st.st_gid, GROUP);
    CHECK_EQ_INT(st.st_mode & 07777, 0750);
    const int fd = listen_in(&dir);
    st = look(SHARED_DIR_SOCKET);
    CHECK_EQ_INT(st.st_gid, GROUP);
    CHECK_EQ_INT(st.st_mode & 07777, 0660);
    CHECK_EQ_INT(look("lock").st_mode & 07777, 0600);
    close(fd);
    rundir_finish(&dir);
    prepare(&dir); /* once more */
    rundir_finish(&dir);
    end();
}

TEST(one_of_another_group_or_mode_is_refused) {
    static const mode_t modes[] = {0700, 0751, 0755, 0770, 0777, 01777};
    rundir_t dir;
    begin();
    prepare(&dir);
    rundir_finish(&dir);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        CHECK_EQ_INT(chmod(place, modes[i]), 0);
        CHECK_STATUS(GRADD_E_IO, shared_dir_prepare(&dir, GROUP));
        CHECK_ERROR_HAS("chmod 750");
        rundir_finish(&dir);
    }
    CHECK_EQ_INT(chmod(place, 0750), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_prepare(&dir, GROUP + 1));
    CHECK_ERROR_HAS("chgrp 6");
    rundir_finish(&dir);
    CHECK_EQ_INT(chown(place, USER, GROUP), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_prepare(&dir, GROUP));
    CHECK_ERROR_HAS("belongs to uid 1");
    rundir_finish(&dir);
    end();
}

TEST(a_link_in_its_place_is_refused) {
    rundir_t dir;
    char target[96];
    begin();
    snprintf(target, sizeof target, "%s/target", base);
    CHECK_EQ_INT(mkdir(target, 0750), 0);
    CHECK_EQ_INT(symlink(target, place), 0);
    CHECK_OK(shared_dir_init(&dir, place));
    CHECK_STATUS(GRADD_E_IO, shared_dir_prepare(&dir, GROUP));
    CHECK_ERROR_HAS("symbolic link");
    CHECK_STATUS(GRADD_E_IO, shared_dir_init(&dir, "run/gradd"));
    CHECK_ERROR_HAS("absolute path");
    end();
}

TEST(parents_are_roots) {
    rundir_t dir;
    char other[96];
    begin();
    CHECK_OK(shared_dir_init(&dir, "/gradd-shared"));
    CHECK_EQ_INT(chmod(base, 0775), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_init(&dir, place));
    CHECK_ERROR_HAS("has mode 0775; only root may");
    CHECK_EQ_INT(chmod(base, 01777), 0); /* as /tmp: others can rename their own alone */
    CHECK_OK(shared_dir_init(&dir, place));
    CHECK_EQ_INT(chown(base, USER, 0), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_init(&dir, place));
    CHECK_ERROR_HAS("belongs to uid 1");
    CHECK_EQ_INT(chown(base, 0, 0), 0);
    snprintf(other, sizeof other, "%s/link", base);
    CHECK_EQ_INT(symlink(base, other), 0);
    strcat(other, "/run/");
    CHECK_OK(shared_dir_init(&dir, other));
    CHECK_EQ_STR(dir.path, place);
    end();
}

TEST(a_folder_is_its_users_alone) {
    rundir_t dir;
    char path[96];
    begin();
    prepare(&dir);
    for (int i = 0; i < 2; i++) { /* there is one the second time */
        CHECK_OK(shared_dir_make_folder(&dir, USER, USER));
        const struct stat st = look("1");
        CHECK_EQ_INT(st.st_uid, USER);
        CHECK_EQ_INT(st.st_mode & 07777, 0700);
    }
    snprintf(path, sizeof path, "%s/1", place);
    CHECK_EQ_INT(chmod(path, 0711), 0); /* by the user */
    CHECK_STATUS(GRADD_E_IO, shared_dir_make_folder(&dir, USER, USER));
    CHECK_EQ_INT(chown(path, USER + 1, USER), 0);
    CHECK_EQ_INT(chmod(path, 0700), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_make_folder(&dir, USER, USER));
    CHECK_ERROR_HAS("not a directory of uid 1 with mode 0700");
    CHECK_EQ_INT(chown(path, 0, 0), 0); /* a supervisor was killed after mkdir() */
    CHECK_OK(shared_dir_make_folder(&dir, USER, USER));
    CHECK_EQ_INT(look("1").st_uid, USER);
    rundir_finish(&dir);
    end();
}

/* What the link leads to stays as it is. */
TEST(a_link_in_place_of_a_folder_is_refused) {
    rundir_t dir;
    char path[96], target[96];
    struct stat st;
    begin();
    prepare(&dir);
    snprintf(path, sizeof path, "%s/1", place);
    snprintf(target, sizeof target, "%s/target", base);
    CHECK_EQ_INT(mkdir(target, 0700), 0);
    CHECK_EQ_INT(symlink(target, path), 0);
    CHECK_STATUS(GRADD_E_IO, shared_dir_make_folder(&dir, USER, USER));
    CHECK_ERROR_HAS("not a directory");
    CHECK_EQ_INT(stat(target, &st), 0);
    CHECK_EQ_INT(st.st_uid, 0);
    rundir_finish(&dir);
    end();
}

static bool is_shared(void) {
    return shared_dir_is(place);
}

static bool goes_on(void) {
    rundir_t dir;
    char path[96];
    snprintf(path, sizeof path, "%s/%u", place, (unsigned)geteuid());
    return rundir_init(&dir, place) == GRADD_OK && !strcmp(dir.path, path);
}

/* Root's own directory becomes a shared one by a supervisor that listens there. */
TEST(programs_go_on_to_the_users_folder) {
    rundir_t dir;
    begin();
    prepare(&dir);
    CHECK(!is_shared() && !goes_on());
    CHECK(as_user(USER, GROUP, is_shared) && as_user(USER, GROUP, goes_on));
    CHECK(as_user(USER, USER, goes_on)); /* where it finds nothing */
    const int fd = listen_in(&dir);
    CHECK(is_shared() && goes_on());
    CHECK_EQ_INT(chmod(place, 0700), 0);
    CHECK(!is_shared() && !as_user(USER, GROUP, is_shared));
    CHECK_EQ_INT(chmod(place, 0770), 0); /* others could put a socket there */
    CHECK(!is_shared() && !as_user(USER, GROUP, is_shared));
    CHECK_EQ_INT(chmod(place, 0750), 0);
    CHECK_EQ_INT(chown(place, USER, GROUP), 0);
    CHECK(!is_shared() && !as_user(USER + 1, GROUP, is_shared));
    close(fd);
    rundir_finish(&dir);
    end();
}
