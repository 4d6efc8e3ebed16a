/* See quota.h. The file is text, a rule in each line, and ends with a line that says so: it is
 * written over in place, and what a longer one has left behind that line is not read. */
#include "server/session/quota.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/host/rundir.h"
#include "server/session/fair.h"

#define LINE_BYTES 128
#define FILE_BYTES ((QUOTA_MOST + 1) * LINE_BYTES)
#define END        "end\n"

void quota_name(char out[QUOTA_NAME_BYTES], const char *text, size_t bytes) {
    const size_t n = bytes < QUOTA_NAME_BYTES - 1 ? bytes : QUOTA_NAME_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        out[i] = text[i] > 0x20 && text[i] < 0x7f ? text[i] : '_';
    out[n] = 0;
}

static int find(const quotas_t *quotas, const char *name) {
    for (int i = 0; i < quotas->n; i++)
        if (!strcmp(quotas->rules[i].name, name)) return i;
    return -1;
}

quota_t quota_for(const quotas_t *quotas, const char *name) {
    int i = find(quotas, name);
    if (i < 0) i = find(quotas, QUOTA_OTHERS);
    if (i >= 0) return quotas->rules[i];
    return (quota_t){.share = FAIR_SHARE};
}

/* ---- the file ---- */

static bool read_rule(const char *line, quota_t *out) {
    unsigned long share, sessions;
    long long bytes;
    int end = 0;
    *out = (quota_t){0};
    if (sscanf(line, "%63s %lu %lu %lld%n", out->name, &share, &sessions, &bytes, &end) != 4 ||
        line[end] != '\n' || share < 1 || share > FAIR_SHARE_MAX || sessions > UINT32_MAX ||
        bytes < 0)
        return false;
    out->share = (uint32_t)share;
    out->n_sessions = (uint32_t)sessions;
    out->bytes = bytes;
    return true;
}

static bool read_text(quotas_t *quotas, const char *text) {
    while (strncmp(text, END, sizeof END - 1) != 0) {
        const char *end = strchr(text, '\n');
        if (!end || quotas->n == QUOTA_MOST || !read_rule(text, &quotas->rules[quotas->n]))
            return false;
        quotas->n++;
        text = end + 1;
    }
    return true;
}

gradd_status_t quota_read(quotas_t *quotas, int folder) {
    char text[FILE_BYTES + 1];
    quotas->folder = folder;
    quotas->n = 0;
    const int fd = rundir_open(folder, QUOTA_FILE, O_RDONLY);
    if (fd < 0 && errno == ENOENT) return GRADD_OK;
    if (fd < 0) return GRADD_FAIL(IO, "the file '" QUOTA_FILE "': %s", strerror(errno));
    const ssize_t n = read(fd, text, FILE_BYTES);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    if (n >= 0 && read_text(quotas, text)) return GRADD_OK;
    return GRADD_FAIL(IO, "the file '" QUOTA_FILE "' is damaged behind rule %d", quotas->n);
}

static gradd_status_t write_file(const quotas_t *quotas) {
    char text[FILE_BYTES];
    size_t n = 0;
    if (quotas->folder < 0) return GRADD_OK;
    for (int i = 0; i < quotas->n; i++) {
        const quota_t *rule = &quotas->rules[i];
        n += (size_t)snprintf(text + n, LINE_BYTES, "%s %u %u %lld\n", rule->name, rule->share,
                              rule->n_sessions, (long long)rule->bytes);
    }
    memcpy(text + n, END, sizeof END - 1);
    n += sizeof END - 1;
    const int fd = rundir_open(quotas->folder, QUOTA_FILE, O_WRONLY | O_CREAT);
    const bool written =
        fd >= 0 && pwrite(fd, text, n, 0) == (ssize_t)n && ftruncate(fd, (off_t)n) == 0;
    const int why = errno;
    if (fd >= 0) close(fd);
    if (written) return GRADD_OK;
    return GRADD_FAIL(IO, "it holds until the daemon ends, but cannot be written to '%s': %s",
                      QUOTA_FILE, strerror(why));
}

gradd_status_t quota_set(quotas_t *quotas, const quota_t *rule) {
    int i = find(quotas, rule->name);
    if (i < 0 && quotas->n == QUOTA_MOST)
        return GRADD_FAIL(LIMIT, "there are %d rules, the limit", QUOTA_MOST);
    if (i < 0) i = quotas->n++;
    quotas->rules[i] = *rule;
    return write_file(quotas);
}

gradd_status_t quota_remove(quotas_t *quotas, const char *name) {
    const int i = find(quotas, name);
    if (i < 0) return GRADD_FAIL(UNSUPPORTED, "there is no rule for '%s'", name);
    quotas->rules[i] = quotas->rules[--quotas->n];
    return write_file(quotas);
}
