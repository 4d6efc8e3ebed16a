/* Counting descriptors. See descriptors.h. */
#include "tests/c/descriptors.h"

#include <dirent.h>
#include <time.h>

int open_descriptors(void) {
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

int settled_descriptors(int expected) {
    const struct timespec pause = {.tv_nsec = 1000000};
    int n = open_descriptors();
    for (int i = 0; i < 5000 && n != expected; i++) {
        nanosleep(&pause, NULL);
        n = open_descriptors();
    }
    return n;
}
