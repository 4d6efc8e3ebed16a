/* Files where the system has POSIX's: shared by the platforms that do. See platform.h. */
#ifndef GRADD_PLATFORM_FILES_H
#define GRADD_PLATFORM_FILES_H

#include "platform/platform.h"

gradd_status_t files_read(const char *path, size_t most, void **out_bytes, size_t *out_n);
gradd_status_t files_write(const char *path, const gradd_file_part_t *parts, int n);
/* The disk keeps the names in the path's folder. A file system that cannot do that needs no help.
 * Changes the path. */
void files_keep_folder(char *path);

/* disk.c: files that are written in place. */
gradd_status_t disk_open(const char *path, bool fresh, gradd_file_t **out_file);
void disk_close(gradd_file_t *file, bool remove);
bool disk_is_named(const gradd_file_t *file, const char *path);
gradd_status_t disk_bytes(gradd_file_t *file, uint64_t *out_bytes);
gradd_status_t disk_read(gradd_file_t *file, uint64_t at, void *to, size_t n);
gradd_status_t disk_write(gradd_file_t *file, uint64_t at, const void *from, size_t n);
gradd_status_t disk_keep(gradd_file_t *file);
gradd_status_t disk_keep_as(gradd_file_t *file, const char *path);
int disk_descriptor(const gradd_file_t *file);

#endif
