/* Files where the system has POSIX's: shared by the platforms that do. See platform.h. */
#ifndef GRADD_PLATFORM_FILES_H
#define GRADD_PLATFORM_FILES_H

#include "platform/platform.h"

gradd_status_t files_read(const char *path, size_t most, void **out_bytes, size_t *out_n);
gradd_status_t files_write(const char *path, const gradd_file_part_t *parts, int n);

#endif
