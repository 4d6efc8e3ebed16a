/* libFuzzer target: the manifest of a kept session, and the notes in the memory that it names.
 *
 * The input is the manifest with its length (two bytes) in front of it, then the memory, in which
 * notes and journal both lie. What is read of it is printed, as `gradd show` does; whatever it
 * says, notes are those of a step that is done, and lie in the memory.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/cli/notes.h"
#include "server/wire/print.h"
#include "tests/fuzz/target.h"

enum { SLOT = 192, HEAD = 64, JOURNAL = 1024, MEMORY = 1088, STEPS = 5, CHUNK_BITS = 24 };

static int files[2] = {-1, -1}; /* manifest, memory */
static FILE *printed;

static void fill(int fd, const uint8_t *data, size_t n) {
    REQUIRE(ftruncate(fd, 0) == 0 && pwrite(fd, data, n, 0) == (ssize_t)n);
}

static void check(const notes_t *notes, size_t memory_bytes) {
    REQUIRE(notes->steps >= 0);
    REQUIRE(notes->n_bytes > 0 && notes->n_bytes <= memory_bytes);
    print_json(printed, &notes->doc.root);
    rewind(printed);
}

/* 1: there are notes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    notes_place_t place = {0};
    notes_t notes;
    if (n < 2) return 0;
    size_t bytes = data[0] | (size_t)data[1] << 8;
    if (bytes > n - 2) bytes = n - 2;
    fill(files[0], data + 2, bytes);
    fill(files[1], data + 2 + bytes, n - 2 - bytes);
    if (notes_find(files[0], &place) != GRADD_OK) {
        REQUIRE(gradd_error_message()[0]);
        return 0;
    }
    const int memory[2] = {files[1], place.has_journal ? files[1] : -1};
    const gradd_status_t st = notes_take(memory, &place, &notes);
    REQUIRE(st == GRADD_OK || gradd_error_message()[0]);
    if (st == GRADD_OK) check(&notes, n - 2 - bytes);
    notes_finish(&notes);
    return st == GRADD_OK && getenv("GRADD_FUZZ_SEEDS");
}

static void put_place(wire_out_t *out, uint64_t offset, uint64_t bytes) {
    wire_put_text(out, "at");
    wire_put_list(out, 3);
    wire_put_u64(out, 1);
    wire_put_u64(out, offset);
    wire_put_u64(out, bytes);
}

static void put_manifest(wire_out_t *out, bool journal) {
    wire_begin(out);
    wire_key(out, "version");
    wire_put_u64(out, 1);
    wire_key(out, "notes");
    wire_put_map(out, 2);
    wire_put_text(out, "slot");
    wire_put_u64(out, SLOT);
    put_place(out, 0, JOURNAL);
    if (journal) {
        wire_key(out, "optimizer");
        wire_put_map(out, 1);
        wire_put_text(out, "journal");
        wire_put_map(out, 1);
        put_place(out, JOURNAL, MEMORY - JOURNAL);
    }
    wire_end(out);
    REQUIRE(!out->failed);
}

/* {"user": bytes of {"epoch": 3, "loss": 0.5, "names": ["a\"b"]}} */
static void put_notes(wire_out_t *out) {
    wire_out_t user = {0};
    wire_begin(&user);
    wire_key(&user, "epoch");
    wire_put_u64(&user, 3);
    wire_key(&user, "loss");
    wire_put_f64(&user, 0.5);
    wire_key(&user, "names");
    wire_put_list(&user, 1);
    wire_put_text(&user, "a\"b");
    wire_end(&user);
    wire_begin(out);
    wire_key(out, "user");
    wire_put_bytes(out, user.data, user.bytes);
    wire_end(out);
    REQUIRE(!user.failed && !out->failed && out->bytes <= SLOT);
    wire_out_finish(&user);
}

static void put_memory(uint8_t *memory) {
    wire_out_t notes = {0};
    const int64_t done[] = {0, STEPS}, progress = (int64_t)STEPS << CHUNK_BITS;
    uint8_t *slot = memory + HEAD + STEPS % 2 * (HEAD + SLOT);
    put_notes(&notes);
    const int64_t head[] = {STEPS, (int64_t)notes.bytes};
    memcpy(memory, "GRADNOTE", 8);
    memcpy(memory + 8, done, sizeof done);
    memcpy(slot, head, sizeof head);
    memcpy(slot + HEAD, notes.data, notes.bytes);
    memcpy(memory + JOURNAL + 8, &progress, sizeof progress);
    wire_out_finish(&notes);
}

static void write_seed(const char *folder, int number, bool journal) {
    static uint8_t seed[8192];
    char path[4096];
    wire_out_t manifest = {0};
    put_manifest(&manifest, journal);
    const size_t n = 2 + manifest.bytes + MEMORY;
    memset(seed, 0, sizeof seed);
    seed[0] = (uint8_t)manifest.bytes, seed[1] = (uint8_t)(manifest.bytes >> 8);
    memcpy(seed + 2, manifest.data, manifest.bytes);
    put_memory(seed + 2 + manifest.bytes);
    wire_out_finish(&manifest);
    REQUIRE(LLVMFuzzerTestOneInput(seed, n) == 1); /* it is right */
    snprintf(path, sizeof path, "%s/seed_%d", folder, number);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(seed, 1, n, file) == n);
    fclose(file);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    for (int i = 0; i < 2; i++) {
        files[i] = memfd_create("fuzz", MFD_CLOEXEC);
        REQUIRE(files[i] >= 0);
    }
    printed = fopen("/dev/null", "w");
    REQUIRE(printed);
    if (!folder) return 0;
    write_seed(folder, 0, true);
    write_seed(folder, 1, false);
    exit(0);
}
