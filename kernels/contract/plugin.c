/* See plugin.h. */
#include "kernels/contract/plugin.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST = 16 };

typedef struct loaded_s {
    char name[32];
    const gradd_backend_t *table;
} loaded_t;

static loaded_t loaded[MOST];
static int n_loaded;

static bool is_name(const char *name) {
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++)
        if (!islower((unsigned char)name[i]) && !isdigit((unsigned char)name[i])) return false;
    return n && n < sizeof loaded[0].name;
}

/* The folder of the running program, without its last part; "" if that is not known. */
static void own_folder(char *out, size_t bytes) {
    const ssize_t n = readlink("/proc/self/exe", out, bytes - 1);
    out[n < 0 ? 0 : n] = 0;
    char *slash = strrchr(out, '/');
    if (slash) *slash = 0;
}

const char *gradd_plugin_folder(void) {
    static char folder[4200];
    char own[4096];
    const char *given = getenv("GRADD_PLUGINS");
    if (given && *given) {
        snprintf(folder, sizeof folder, "%s", given);
        return folder;
    }
    own_folder(own, sizeof own);
    snprintf(folder, sizeof folder, "%s/../lib", own);
    return folder;
}

const char *gradd_plugin_path(const char *name) {
    static char path[4300];
    if (!is_name(name)) return NULL;
    snprintf(path, sizeof path, "%s/libgradd_%s.so", gradd_plugin_folder(), name);
    return path;
}

static bool is_object(const ElfW(Ehdr) * head) {
    return !memcmp(head->e_ident, ELFMAG, SELFMAG) && head->e_phentsize == sizeof(ElfW(Phdr));
}

/* Bytes that the file must have for all that the loader maps to be there; -1: no shared object. */
static int64_t bytes_mapped(int fd) {
    ElfW(Ehdr) head;
    if (pread(fd, &head, sizeof head, 0) != sizeof head || !is_object(&head)) return -1;
    if (head.e_phoff > INT64_MAX / 2) return INT64_MAX;
    uint64_t end = head.e_phoff + head.e_phnum * sizeof(ElfW(Phdr));
    for (int i = 0; i < head.e_phnum; i++) {
        ElfW(Phdr) part;
        const off_t at = (off_t)(head.e_phoff + (size_t)i * sizeof part);
        if (pread(fd, &part, sizeof part, at) != sizeof part) break; /* `end` is beyond the file */
        if (part.p_filesz > INT64_MAX / 2 || part.p_offset > INT64_MAX / 2) return INT64_MAX;
        if (part.p_offset + part.p_filesz > end) end = part.p_offset + part.p_filesz;
    }
    return (int64_t)end;
}

static gradd_status_t refuse(const char *path, const char *why) {
    return GRADD_FAIL(DEVICE, "the plug-in %s cannot be used: %s", path, why);
}

/* The loader maps what the file's head names: touching bytes that were not copied would end the
 * process, by SIGBUS. */
static gradd_status_t check_open(int fd, const char *path) {
    struct stat about;
    if (fstat(fd, &about)) return refuse(path, strerror(errno));
    if (S_ISDIR(about.st_mode)) return refuse(path, "it is a folder");
    if (!S_ISREG(about.st_mode)) return refuse(path, "it is no regular file");
    const int64_t bytes = bytes_mapped(fd);
    if (bytes < 0) return refuse(path, "it is no shared object (ELF)");
    if (bytes > about.st_size)
        return GRADD_FAIL(DEVICE,
                          "the plug-in %s cannot be used: it was copied in part or is damaged, as "
                          "its segments end at byte %lld of %lld",
                          path, (long long)bytes, (long long)about.st_size);
    return GRADD_OK;
}

static gradd_status_t check_file(const char *name, const char *path) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a fifo would wait */
    if (fd < 0 && errno != ENOENT && errno != ENOTDIR) return refuse(path, strerror(errno));
    if (fd < 0 && strcmp(name, GRADD_PLUGIN_CUDA))
        return GRADD_FAIL(
            UNSUPPORTED, "there is no device '%.60s', neither in this build nor as a plug-in at %s",
            name, path);
    if (fd < 0)
        return GRADD_FAIL(DEVICE, "there is no plug-in at %s (`make cuda` builds it)", path);
    const gradd_status_t status = check_open(fd, path);
    close(fd);
    return status;
}

static gradd_status_t load(const char *name, const char *path, const gradd_backend_t **out) {
    gradd_plugin_t entry;
    GRADD_TRY(check_file(name, path));
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!object) return refuse(path, dlerror());
    void *symbol = dlsym(object, GRADD_PLUGIN_ENTRY);
    if (!symbol) return GRADD_FAIL(DEVICE, "%s is no plug-in of gradd", path);
    memcpy(&entry, &symbol, sizeof entry);
    GRADD_TRY(entry(GRADD_BACKEND_ABI, out));
    if ((*out)->abi == GRADD_BACKEND_ABI && (*out)->size >= sizeof(gradd_backend_t))
        return GRADD_OK;
    return GRADD_FAIL(VERSION, "the plug-in '%s' has version %u of the device table, expected %u",
                      name, (*out)->abi, GRADD_BACKEND_ABI);
}

gradd_status_t gradd_plugin_load(const char *name, const gradd_backend_t **out) {
    for (int i = 0; i < n_loaded; i++)
        if (!strcmp(loaded[i].name, name)) {
            *out = loaded[i].table;
            return GRADD_OK;
        }
    const char *path = gradd_plugin_path(name);
    if (!path || n_loaded == MOST)
        return GRADD_FAIL(UNSUPPORTED, "there is no device '%.60s'", name);
    GRADD_TRY(load(name, path, out));
    snprintf(loaded[n_loaded].name, sizeof loaded[0].name, "%s", name);
    loaded[n_loaded++].table = *out;
    return GRADD_OK;
}
