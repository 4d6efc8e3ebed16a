/* Rules for sessions by name, and their file. */
#include "server/session/quota.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/session/fair.h"
#include "tests/test.h"

static char path[] = "/tmp/gradd-quota-XXXXXX";

static int make_dir(void) {
    CHECK(mkdtemp(path) != NULL);
    const int folder = open(path, O_RDONLY | O_DIRECTORY);
    CHECK(folder >= 0);
    return folder;
}

static void remove_dir(int folder) {
    unlinkat(folder, QUOTA_FILE, 0);
    CHECK_EQ_INT(rmdir(path), 0);
    close(folder);
}

static void write_file(int folder, const char *text) {
    const int fd = openat(folder, QUOTA_FILE, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

TEST(rules_outlive_the_daemon) {
    static quotas_t quotas, next;
    const int folder = make_dir();
    CHECK_OK(quota_read(&quotas, folder));
    CHECK_EQ_INT(quota_for(&quotas, "train.py").share, FAIR_SHARE);
    CHECK_OK(quota_set(&quotas, &(quota_t){"train.py", 300, 2, (int64_t)5 << 40}));
    CHECK_OK(quota_set(&quotas, &(quota_t){QUOTA_OTHERS, 50, 0, 1 << 30}));
    CHECK_OK(quota_read(&next, folder));
    CHECK_EQ_INT(next.n, 2);
    const quota_t own = quota_for(&next, "train.py"), other = quota_for(&next, "a.ipynb");
    CHECK_EQ_INT(own.share, 300);
    CHECK_EQ_INT(own.n_sessions, 2);
    CHECK_EQ_INT(own.bytes, (int64_t)5 << 40);
    CHECK_EQ_INT(other.share, 50);
    CHECK_EQ_INT(other.bytes, 1 << 30);
    CHECK_OK(quota_remove(&next, QUOTA_OTHERS));
    CHECK_STATUS(GRADD_E_UNSUPPORTED, quota_remove(&next, QUOTA_OTHERS));
    CHECK_ERROR_HAS("no rule for 'others'");
    CHECK_OK(quota_read(&quotas, folder));
    CHECK_EQ_INT(quotas.n, 1);
    remove_dir(folder);
}

TEST(a_rule_takes_the_place_of_the_former_one) {
    static quotas_t quotas = {.folder = -1};
    CHECK_OK(quota_set(&quotas, &(quota_t){"a", 10, 0, 0}));
    CHECK_OK(quota_set(&quotas, &(quota_t){"a", 20, 0, 0}));
    CHECK_EQ_INT(quotas.n, 1);
    CHECK_EQ_INT(quota_for(&quotas, "a").share, 20);
}

TEST(rules_have_a_limit) {
    static quotas_t quotas, next;
    const int folder = make_dir();
    quota_t rule = {.share = FAIR_SHARE_MAX, .n_sessions = UINT32_MAX, .bytes = INT64_MAX};
    CHECK_OK(quota_read(&quotas, folder));
    memset(rule.name, 'x', QUOTA_NAME_BYTES - 1);
    for (int i = 0; i < QUOTA_MOST; i++) {
        rule.name[0] = (char)('!' + i);
        CHECK_OK(quota_set(&quotas, &rule));
    }
    rule.name[0] = '~';
    CHECK_STATUS(GRADD_E_LIMIT, quota_set(&quotas, &rule));
    CHECK_OK(quota_read(&next, folder)); /* the longest lines fit */
    CHECK_EQ_INT(next.n, QUOTA_MOST);
    CHECK_EQ_INT(next.rules[QUOTA_MOST - 1].bytes, INT64_MAX);
    remove_dir(folder);
}

TEST(a_damaged_file_is_named) {
    static const char *const damaged[] = {
        "",
        "a 100 0 0\n",             /* without its last line */
        "a 100 0 0 b\nend\n",      /* more in a line */
        "a 0 0 0\nend\n",          /* no share */
        "a 10001 0 0\nend\n",      /* above the most */
        "a 100 -1 0\nend\n",       /* below 0 */
        "a 100 0 -1\nend\n",       /* the same */
        "a 100 0 x\nend\n",        /* no number */
        "a 100 0 0\nb 1 end\nend", /* a line that ends early */
    };
    static quotas_t quotas;
    const int folder = make_dir();
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        write_file(folder, damaged[i]);
        CHECK_STATUS(GRADD_E_IO, quota_read(&quotas, folder));
        CHECK_ERROR_HAS("'quotas'");
    }
    write_file(folder, "a 100 0 0\nend\nof a longer one");
    CHECK_OK(quota_read(&quotas, folder));
    CHECK_EQ_INT(quotas.n, 1);
    remove_dir(folder);
}

TEST(a_fifo_in_the_place_of_the_file_is_not_waited_for) {
    static quotas_t quotas;
    const int folder = make_dir();
    CHECK_EQ_INT(mkfifoat(folder, QUOTA_FILE, 0600), 0);
    CHECK_STATUS(GRADD_E_IO, quota_read(&quotas, folder));
    const quota_t rule = {.name = "a", .share = 50};
    CHECK_STATUS(GRADD_E_IO, quota_set(&quotas, &rule));
    CHECK_ERROR_HAS("it holds until the daemon ends");
    CHECK_EQ_INT(quota_for(&quotas, "a").share, 50);
    remove_dir(folder);
}

TEST(names_are_words) {
    char name[QUOTA_NAME_BYTES];
    quota_name(name, "my tests\n.ipynb\x80", 16);
    CHECK(strcmp(name, "my_tests_.ipynb_") == 0);
    char longer[100];
    memset(longer, 'a', sizeof longer);
    quota_name(name, longer, sizeof longer);
    CHECK_EQ_INT(strlen(name), QUOTA_NAME_BYTES - 1);
}
