/* The build id, read from the notes of the running program. See build.h. */
#include "server/daemon/build.h"

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define ID_BYTES 20 /* SHA-1 */

static char id[2 * ID_BYTES + 1];

static size_t padded(size_t bytes, size_t align) {
    return (bytes + align - 1) / align * align;
}

static void read_note(const ElfW(Nhdr) * note, const unsigned char *name,
                      const unsigned char *content) {
    if (note->n_type != NT_GNU_BUILD_ID || note->n_namesz != 4 || memcmp(name, "GNU", 4) != 0)
        return;
    for (size_t i = 0; i < note->n_descsz && i < ID_BYTES; i++)
        snprintf(id + 2 * i, 3, "%02x", content[i]);
}

static int read_program(struct dl_phdr_info *info, size_t bytes, void *arg) {
    (void)bytes;
    (void)arg;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[k];
        size_t align = segment->p_align == 8 ? 8 : 4;
        const unsigned char *at = (const unsigned char *)(info->dlpi_addr + segment->p_vaddr);
        const unsigned char *end = at + segment->p_memsz;
        while (segment->p_type == PT_NOTE && end - at >= (ptrdiff_t)sizeof(ElfW(Nhdr))) {
            const ElfW(Nhdr) *note = (const ElfW(Nhdr) *)at;
            const unsigned char *name = at + sizeof *note;
            const unsigned char *content = name + padded(note->n_namesz, align);
            read_note(note, name, content);
            at = content + padded(note->n_descsz, align);
        }
    }
    return 1; /* the first object is the program: the libraries do not matter */
}

const char *build_id(void) {
    if (!id[0]) dl_iterate_phdr(read_program, NULL);
    return id;
}
