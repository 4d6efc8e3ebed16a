/* Windows 10 and later: memory, a clock and files by its own functions. Paths are UTF-8. Files are
 * read, not mapped: a file that is mapped there can be neither replaced nor cut. See platform.h. */
#ifndef _WIN32_WINNT
#define _WIN32_WINNT 0x0A00
#endif
#include <windows.h>

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "platform/platform.h"

/* ---- memory and clock ------------------------------------------------------------------------ */

#define MAP_FROM ((size_t)2 << 20) /* from here on memory comes straight from the system */
#define ALIGN    ((size_t)64)

static void *take(size_t bytes) {
    if (bytes < MAP_FROM) return _aligned_malloc(bytes + 1, ALIGN);
    return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

static void give_back(void *memory, size_t bytes) {
    if (!memory) return;
    if (bytes < MAP_FROM)
        _aligned_free(memory);
    else
        VirtualFree(memory, 0, MEM_RELEASE);
}

static double seconds(void) {
    LARGE_INTEGER now, each;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&each);
    return (double)now.QuadPart / (double)each.QuadPart;
}

/* ---- names ----------------------------------------------------------------------------------- */

static gradd_status_t no_memory(const char *path) {
    return GRADD_FAIL(NOMEM, "no memory to open '%s'", path);
}

static gradd_status_t failed(const char *what, const char *path) {
    char text[160] = "";
    const DWORD code = GetLastError();
    DWORD n = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL, code,
                             0, text, sizeof text - 1, NULL);
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == '.'))
        text[--n] = 0;
    return GRADD_FAIL(IO, "cannot %s '%s': %s (%lu)", what, path, text, (unsigned long)code);
}

/* The path as Windows takes it, to be freed, with room for `more` characters behind it. */
static gradd_status_t wide_path(const char *path, size_t more, WCHAR **out) {
    const int n = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, NULL, 0);
    if (n <= 0) return GRADD_FAIL(IO, "cannot open '%s': the name is no UTF-8", path);
    WCHAR *wide = malloc(((size_t)n + more) * sizeof *wide);
    if (!wide) return no_memory(path);
    MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, n);
    *out = wide;
    return GRADD_OK;
}

/* ---- files that are read, or written, as a whole ----------------------------------------------
 */

#define MOST_AT_ONCE ((size_t)1 << 30) /* bytes that a call moves */

/* Bytes at a position, or the next ones where there is none. */
static gradd_status_t read_bytes(HANDLE file, const char *path, OVERLAPPED *at, void *to,
                                 size_t n) {
    for (size_t done = 0; done < n;) {
        DWORD got = 0;
        const size_t left = n - done, some = left < MOST_AT_ONCE ? left : MOST_AT_ONCE;
        if (!ReadFile(file, (char *)to + done, (DWORD)some, &got, at) &&
            GetLastError() != ERROR_HANDLE_EOF)
            return failed("read", path);
        if (!got) return GRADD_FAIL(IO, "'%s' became shorter while it was read", path);
        done += got;
        if (at && (at->Offset += got) < got) at->OffsetHigh++;
    }
    return GRADD_OK;
}

static gradd_status_t write_bytes(HANDLE file, const char *path, OVERLAPPED *at, const void *from,
                                  size_t n) {
    for (size_t done = 0; done < n;) {
        DWORD put = 0;
        const size_t left = n - done, some = left < MOST_AT_ONCE ? left : MOST_AT_ONCE;
        if (!WriteFile(file, (const char *)from + done, (DWORD)some, &put, at) || !put)
            return failed("write", path);
        done += put;
        if (at && (at->Offset += put) < put) at->OffsetHigh++;
    }
    return GRADD_OK;
}

static gradd_status_t size_of(HANDLE file, const char *path, uint64_t *out_bytes) {
    LARGE_INTEGER bytes;
    if (GetFileType(file) != FILE_TYPE_DISK) return GRADD_FAIL(IO, "'%s' is not a file", path);
    if (!GetFileSizeEx(file, &bytes)) return failed("read", path);
    *out_bytes = (uint64_t)bytes.QuadPart;
    return GRADD_OK;
}

static gradd_status_t read_open(HANDLE file, const char *path, size_t most, void **out_bytes,
                                size_t *out_n) {
    uint64_t n;
    GRADD_TRY(size_of(file, path, &n));
    if (n > most || n >= SIZE_MAX)
        return GRADD_FAIL(LIMIT, "'%s' has %llu bytes, at most %zu", path, (unsigned long long)n,
                          most);
    char *bytes = malloc((size_t)n + 1);
    if (!bytes) return GRADD_FAIL(NOMEM, "no memory for '%s'", path);
    const gradd_status_t status = read_bytes(file, path, NULL, bytes, (size_t)n);
    if (status) {
        free(bytes);
        return status;
    }
    bytes[n] = 0;
    *out_bytes = bytes;
    *out_n = (size_t)n;
    return GRADD_OK;
}

static gradd_status_t read_file(const char *path, size_t most, void **out_bytes, size_t *out_n) {
    WCHAR *wide;
    GRADD_TRY(wide_path(path, 0, &wide));
    const HANDLE file = CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, NULL,
                                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    const gradd_status_t status = file == INVALID_HANDLE_VALUE
                                      ? failed("open", path)
                                      : read_open(file, path, most, out_bytes, out_n);
    if (file != INVALID_HANDLE_VALUE) CloseHandle(file);
    free(wide);
    return status;
}

static gradd_status_t write_beside(const WCHAR *beside, const char *path,
                                   const gradd_file_part_t *parts, int n) {
    const HANDLE file =
        CreateFileW(beside, GENERIC_WRITE, 0, NULL, CREATE_ALWAYS, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file == INVALID_HANDLE_VALUE) return failed("write", path);
    gradd_status_t status = GRADD_OK;
    for (int i = 0; i < n && !status; i++)
        status = write_bytes(file, path, NULL, parts[i].data, parts[i].n);
    if (!status && !FlushFileBuffers(file)) status = failed("write", path);
    if (!CloseHandle(file) && !status) status = failed("write", path);
    return status;
}

static gradd_status_t write_file(const char *path, const gradd_file_part_t *parts, int n) {
    static const WCHAR behind[] = L".new";
    WCHAR *wide, *beside;
    GRADD_TRY(wide_path(path, 0, &wide));
    gradd_status_t status = wide_path(path, sizeof behind / sizeof behind[0], &beside);
    if (!status) {
        wcscat(beside, behind);
        status = write_beside(beside, path, parts, n);
        if (!status &&
            !MoveFileExW(beside, wide, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH))
            status = failed("write", path);
        if (status) DeleteFileW(beside);
        free(beside);
    }
    free(wide);
    return status;
}

/* ---- files that are written in place --------------------------------------------------------- */

struct gradd_file_s {
    HANDLE handle;
    char *path; /* Owned */
};

static void close_file(gradd_file_t *file, bool remove) {
    FILE_DISPOSITION_INFO gone = {.DeleteFile = TRUE};
    if (!file) return;
    if (file->handle != INVALID_HANDLE_VALUE) {
        if (remove)
            SetFileInformationByHandle(file->handle, FileDispositionInfo, &gone, sizeof gone);
        CloseHandle(file->handle);
    }
    free(file->path);
    free(file);
}

/* Nothing else may read or write it meanwhile; a handle that may be renamed over is one that
 * shares its deletion. */
static gradd_status_t open_named(gradd_file_t *file, const WCHAR *wide, bool fresh) {
    uint64_t bytes;
    file->handle = CreateFileW(wide, GENERIC_READ | GENERIC_WRITE | DELETE, FILE_SHARE_DELETE, NULL,
                               fresh ? OPEN_ALWAYS : OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (file->handle == INVALID_HANDLE_VALUE) {
        const DWORD code = GetLastError();
        const bool missing = code == ERROR_FILE_NOT_FOUND || code == ERROR_PATH_NOT_FOUND;
        if (missing && !fresh) return GRADD_OK;
        if (code == ERROR_SHARING_VIOLATION)
            return GRADD_FAIL(STALE, "'%s' is in use: this program or another has it open",
                              file->path);
        return failed("open", file->path);
    }
    GRADD_TRY(size_of(file->handle, file->path, &bytes));
    if (fresh && bytes && !SetEndOfFile(file->handle)) return failed("write", file->path);
    return GRADD_OK;
}

static gradd_status_t open_file(const char *path, bool fresh, gradd_file_t **out_file) {
    WCHAR *wide;
    GRADD_TRY(wide_path(path, 0, &wide));
    gradd_file_t *file = malloc(sizeof *file);
    gradd_status_t status = file ? GRADD_OK : no_memory(path);
    if (file) {
        *file = (gradd_file_t){.handle = INVALID_HANDLE_VALUE, .path = strdup(path)};
        status = file->path ? open_named(file, wide, fresh) : no_memory(path);
        const bool is_there = file->handle != INVALID_HANDLE_VALUE;
        if (status || !is_there) close_file(file, false);
        if (!status) *out_file = is_there ? file : NULL;
    }
    free(wide);
    return status;
}

static bool same_file(HANDLE file, HANDLE other) {
    BY_HANDLE_FILE_INFORMATION a, b;
    return GetFileInformationByHandle(file, &a) && GetFileInformationByHandle(other, &b) &&
           a.dwVolumeSerialNumber == b.dwVolumeSerialNumber &&
           a.nFileIndexHigh == b.nFileIndexHigh && a.nFileIndexLow == b.nFileIndexLow;
}

static bool is_named(const gradd_file_t *file, const char *path) {
    WCHAR *wide;
    if (wide_path(path ? path : file->path, 0, &wide)) return false;
    const HANDLE named =
        CreateFileW(wide, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    free(wide);
    if (named == INVALID_HANDLE_VALUE) return false;
    const bool same = same_file(file->handle, named);
    CloseHandle(named);
    return same;
}

static gradd_status_t file_bytes(gradd_file_t *file, uint64_t *out_bytes) {
    return size_of(file->handle, file->path, out_bytes);
}

static OVERLAPPED position(uint64_t at) {
    return (OVERLAPPED){.Offset = (DWORD)at, .OffsetHigh = (DWORD)(at >> 32)};
}

static gradd_status_t read_at(gradd_file_t *file, uint64_t at, void *to, size_t n) {
    OVERLAPPED where = position(at);
    return read_bytes(file->handle, file->path, &where, to, n);
}

static gradd_status_t write_at(gradd_file_t *file, uint64_t at, const void *from, size_t n) {
    OVERLAPPED where = position(at);
    return write_bytes(file->handle, file->path, &where, from, n);
}

static gradd_status_t keep(gradd_file_t *file) {
    return FlushFileBuffers(file->handle) ? GRADD_OK : failed("keep", file->path);
}

/* The name may belong to a file that is open here: its old contents live on until it is closed.
 * Systems before Windows 10's version 1809 replace files that are closed alone. */
static bool rename_handle(HANDLE handle, const WCHAR *name) {
    const size_t chars = wcslen(name),
                 bytes = sizeof(FILE_RENAME_INFO) + (chars + 1) * sizeof(WCHAR);
    FILE_RENAME_INFO *to = calloc(1, bytes);
    if (!to) {
        SetLastError(ERROR_NOT_ENOUGH_MEMORY);
        return false;
    }
    to->FileNameLength = (DWORD)(chars * sizeof(WCHAR));
    memcpy(to->FileName, name, chars * sizeof(WCHAR));
    *(DWORD *)to = 3; /* FILE_RENAME_FLAG_REPLACE_IF_EXISTS, _POSIX_SEMANTICS */
    bool done = SetFileInformationByHandle(handle, 22 /* FileRenameInfoEx */, to, (DWORD)bytes);
    if (!done) {
        *(DWORD *)to = 0;
        to->ReplaceIfExists = TRUE;
        done = SetFileInformationByHandle(handle, FileRenameInfo, to, (DWORD)bytes);
    }
    free(to);
    return done;
}

static gradd_status_t keep_as(gradd_file_t *file, const char *path) {
    WCHAR *wide, whole[MAX_PATH * 4];
    GRADD_TRY(wide_path(path, 0, &wide));
    char *name = strdup(path);
    gradd_status_t status = name ? GRADD_OK : no_memory(path);
    const DWORD n = GetFullPathNameW(wide, sizeof whole / sizeof whole[0], whole, NULL);
    if (!status && (!n || n >= sizeof whole / sizeof whole[0] ||
                    !rename_handle(file->handle, whole) || !FlushFileBuffers(file->handle)))
        status = failed("write", path);
    if (!status) {
        free(file->path);
        file->path = name;
        name = NULL;
    }
    free(name);
    free(wide);
    return status;
}

const gradd_platform_t gradd_platform = {
    .name = "windows",
    .take = take,
    .give_back = give_back,
    .seconds = seconds,
    .thread_seconds = seconds,
    .read_file = read_file,
    .write_file = write_file,
    .open_file = open_file,
    .close_file = close_file,
    .is_named = is_named,
    .file_bytes = file_bytes,
    .read_at = read_at,
    .write_at = write_at,
    .keep = keep,
    .keep_as = keep_as,
};
