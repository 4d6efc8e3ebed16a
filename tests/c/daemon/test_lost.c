/* Tests of server/verbs/lost: which plans are refused, and what the next daemon knows. */
#include "server/verbs/lost.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/test.h"

static rundir_t dir;

static void make_dir(void) {
    strcpy(dir.path, "/tmp/gradd-lost-XXXXXX");
    CHECK(mkdtemp(dir.path) != NULL);
    dir.folder = open(dir.path, O_RDONLY | O_DIRECTORY);
    CHECK(dir.folder >= 0);
}

static void remove_dir(void) {
    unlinkat(dir.folder, RUNDIR_LOST, 0);
    CHECK_EQ_INT(rmdir(dir.path), 0);
    close(dir.folder);
}

/* A key that begins so. */
static const uint8_t *key(int number) {
    static uint8_t bytes[GRADD_SHA256_BYTES];
    memcpy(bytes, &number, sizeof number);
    return bytes;
}

TEST(two_losses_refuse_a_plan_in_all_daemons) {
    static lost_plans_t lost, next;
    make_dir();
    lost_read(&lost, &dir);
    lost_note(&lost, key(1), true);
    lost_note(&lost, key(1), false);
    CHECK_OK(lost_check(&lost, key(1)));
    lost_read(&next, &dir);
    lost_note(&next, key(1), true);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, lost_check(&next, key(1)));
    CHECK_ERROR_HAS("the device was lost 2 times in a backward of this plan");
    CHECK_OK(lost_check(&next, key(2)));
    lost_read(&lost, &dir);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, lost_check(&lost, key(1)));
    remove_dir();
}

TEST(a_fifo_in_the_place_of_the_file_is_not_waited_for) {
    static lost_plans_t lost;
    make_dir();
    CHECK_EQ_INT(mkfifoat(dir.folder, RUNDIR_LOST, 0600), 0);
    lost_read(&lost, &dir);
    CHECK_EQ_INT(lost.n, 0);
    lost_note(&lost, key(1), true);
    CHECK_EQ_INT(lost.n, 1);
    remove_dir();
}

TEST(an_end_forgets_a_loss_of_the_same_kind) {
    static lost_plans_t lost, next;
    make_dir();
    lost_read(&lost, &dir);
    lost_note(&lost, key(1), true);
    lost_ran(&lost, key(1), false); /* the backward is still to come */
    CHECK_EQ_INT(lost.n, 1);
    lost_ran(&lost, key(1), true);
    lost_read(&next, &dir);
    CHECK_EQ_INT(next.n, 0);
    lost_note(&next, key(1), true);
    CHECK_OK(lost_check(&next, key(1)));
    remove_dir();
}

TEST(the_oldest_of_many_is_forgotten) {
    static lost_plans_t lost; /* of no directory */
    for (int i = 0; i <= LOST_MOST; i++)
        for (int k = 0; k < LOST_TIMES; k++)
            lost_note(&lost, key(i), false);
    CHECK_EQ_INT(lost.n, LOST_MOST);
    CHECK_OK(lost_check(&lost, key(0)));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, lost_check(&lost, key(1)));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, lost_check(&lost, key(LOST_MOST)));
}

TEST(a_part_of_a_file_is_read) {
    static lost_plans_t lost;
    make_dir();
    lost_read(&lost, &dir);
    lost_note(&lost, key(1), false);
    lost_note(&lost, key(2), false);
    const int fd = openat(dir.folder, RUNDIR_LOST, O_WRONLY);
    CHECK_EQ_INT(ftruncate(fd, sizeof(lost_plan_t) + 7), 0);
    close(fd);
    lost_read(&lost, &dir);
    CHECK_EQ_INT(lost.n, 1);
    lost_note(&lost, key(1), false);
    CHECK_STATUS(GRADD_E_UNSUPPORTED, lost_check(&lost, key(1)));
    remove_dir();
}
