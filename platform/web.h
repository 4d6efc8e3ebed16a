/* The file that was written last, where files are held in memory: web.c. */
#ifndef GRADD_PLATFORM_WEB_H
#define GRADD_PLATFORM_WEB_H

#include <stddef.h>

typedef struct web_file_s {
    void *data; /* NULL = none was written since it was forgotten */
    size_t n;
} web_file_t;

const web_file_t *web_file(void);
void web_file_forget(void);

#endif
