/* Writes log lines. See log.h for the format and the rules. */
#include "server/host/log.h"

#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 1024

static const char *const names[] = {"error", "warn", "info", "debug"};
static atomic_int threshold = LOG_INFO;

bool log_set_level(const char *name) {
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strcmp(name, names[i]) != 0) continue;
        atomic_store(&threshold, i);
        return true;
    }
    return false;
}

void log_event(log_level_t level, const char *event, const char *format, ...) {
    if ((int)level > atomic_load_explicit(&threshold, memory_order_relaxed)) return;
    char line[LINE_BYTES];
    struct timespec t;
    struct tm day;
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &day);
    size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &day);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03ldZ level=%s event=%s ",
                          t.tv_nsec / 1000000, names[level], event);
    va_list args;
    va_start(args, format);
    int more = vsnprintf(line + n, sizeof line - n - 1, format, args);
    va_end(args);
    if (more > 0) n += (size_t)more;
    if (n > sizeof line - 2) n = sizeof line - 2;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = '?';
    line[n++] = '\n';
    /* A full pipe, disk or terminal must not stop the daemon: the line is lost then. */
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, 0) != 1 || !(room.revents & POLLOUT)) return;
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written;
}
