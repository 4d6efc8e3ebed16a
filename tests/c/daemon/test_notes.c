/* Notes of a kept session that are none: what its memory says is not believed. */
#include "server/cli/notes.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/test.h"

enum { SLOT = 128, AT = SLOT }; /* the head of the notes lies at AT */

static int memory_of(int64_t steps) {
    /* {"user": bytes of an empty map} */
    static const uint8_t notes[] = {0x81, 0xa4, 'u', 's', 'e', 'r', 0xc4, 1, 0x80};
    uint8_t memory[AT + 64 + 2 * (64 + SLOT)] = {0};
    const int64_t head[] = {0, steps}, slot[] = {steps, sizeof notes};
    uint8_t *at = memory + AT + 64 + steps % 2 * (64 + SLOT);
    memcpy(memory + AT, "GRADNOTE", 8);
    memcpy(memory + AT + 8, head, sizeof head);
    memcpy(at, slot, sizeof slot);
    memcpy(at + 64, notes, sizeof notes);
    const int fd = memfd_create("notes", MFD_CLOEXEC);
    CHECK(fd >= 0 && write(fd, memory, sizeof memory) == (ssize_t)sizeof memory);
    return fd;
}

TEST(a_step_has_a_number) {
    const notes_place_t place = {
        .words = {1, AT},
          .slot = SLOT
    };
    notes_t notes;
    int fds[2] = {memory_of(3), -1};
    CHECK_OK(notes_take(fds, &place, &notes));
    CHECK_EQ_INT(notes.steps, 3);
    notes_finish(&notes);
    close(fds[0]);
    fds[0] = memory_of(-1); /* a slot says so while it is written */
    CHECK_STATUS(GRADD_E_SHM, notes_take(fds, &place, &notes));
    CHECK_ERROR_HAS("-1 steps");
    close(fds[0]);
}
