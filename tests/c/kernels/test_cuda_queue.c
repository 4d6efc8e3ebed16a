/* The CUDA plug-in's device does everything in the order of its queue: each test gives it something
 * that begins late, and then what must come after that. */
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"
#include "tests/test.h"

enum { BYTES = 64 };

/* A device with memory of `BYTES` sevens, once its queue has come so far. */
static gradd_device_t *open_late(void **out) {
    static char sevens[BYTES];
    const gradd_device_options_t options = {.name = "emu"};
    gradd_device_t *d;
    setenv("GRADD_SIM_DELAY_US", "50000", 1);
    memset(sevens, 7, sizeof sevens);
    CHECK_OK(gradd_device_open(&options, &d));
    CHECK_OK(d->backend->alloc(d->queue, BYTES, out));
    CHECK_OK(d->backend->copy(d->queue, *out, sevens, sizeof sevens));
    return d;
}

static void check_byte(gradd_device_t *d, const void *memory, char expected) {
    char found[BYTES];
    CHECK_OK(device_read(d, found, memory, sizeof found));
    CHECK_EQ_INT(found[0], expected);
    CHECK_EQ_INT(found[BYTES - 1], expected);
}

static void drop(gradd_device_t *d, void *memory) {
    d->backend->free(d->queue, memory, BYTES);
    gradd_device_close(d);
}

TEST(a_copy_has_its_turn) {
    void *memory, *other;
    gradd_device_t *d = open_late(&memory);
    CHECK_OK(d->backend->alloc(d->queue, BYTES, &other));
    CHECK_OK(d->backend->copy(d->queue, other, memory, BYTES));
    check_byte(d, other, 7);
    d->backend->free(d->queue, other, BYTES);
    drop(d, memory);
}

TEST(zeros_have_their_turn) {
    void *memory;
    gradd_device_t *d = open_late(&memory);
    CHECK_OK(d->backend->zero(d->queue, memory, BYTES));
    check_byte(d, memory, 0);
    drop(d, memory);
}

TEST(a_word_has_its_turn) {
    void *memory;
    uint64_t word;
    gradd_device_t *d = open_late(&memory);
    CHECK_OK(d->backend->store(d->queue, memory, 5));
    CHECK_OK(device_read(d, &word, memory, sizeof word));
    CHECK_EQ_INT(word, 5);
    drop(d, memory);
}
