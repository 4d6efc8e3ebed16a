/* The hash of bytes is FNV-1a, the same everywhere: values of it outlive the process. */
#include "shm/hash.h"
#include "tests/test.h"

TEST(bytes_hash_as_published) {
    CHECK(gradd_hash_bytes(GRADD_HASH_START, "", 0) == GRADD_HASH_START);
    CHECK(gradd_hash_bytes(GRADD_HASH_START, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    CHECK(gradd_hash_bytes(GRADD_HASH_START, "foobar", 6) == UINT64_C(0x85944171f73967e8));
}

TEST(words_hash_by_their_order) {
    const uint64_t first = gradd_hash_word(gradd_hash_word(GRADD_HASH_START, 1), 2);
    CHECK(first != gradd_hash_word(gradd_hash_word(GRADD_HASH_START, 2), 1));
}
