/* The file that was written last, where files are held in memory: memory_files.c. */
#ifndef GRADD_PLATFORM_MEMORY_FILES_H
#define GRADD_PLATFORM_MEMORY_FILES_H

#include <stddef.h>

typedef struct memory_file_s {
    void *data; /* NULL = none was written since it was forgotten */
    size_t n;
} memory_file_t;

const memory_file_t *memory_file(void);
void memory_file_forget(void);

#endif
