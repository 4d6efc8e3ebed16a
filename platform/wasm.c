/* WebAssembly by emscripten, with the files that it makes up or that node has. See platform.h. */
#include "platform/files.h"
#include "platform/linear.h"

const gradd_platform_t gradd_platform = {
    .name = "wasm",
    .take = linear_take,
    .give_back = linear_give_back,
    .seconds = linear_seconds,
    .thread_seconds = linear_seconds,
    .read_file = files_read,
    .write_file = files_write,
    .open_file = disk_open,
    .close_file = disk_close,
    .is_named = disk_is_named,
    .file_bytes = disk_bytes,
    .read_at = disk_read,
    .write_at = disk_write,
    .keep = disk_keep,
    .keep_as = disk_keep_as,
};
