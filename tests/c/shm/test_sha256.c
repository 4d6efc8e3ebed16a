/* SHA-256 against the vectors of FIPS 180-4 and NIST's examples, whole and in every split. */
#include "shm/sha256.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static void digest_of(const void *data, size_t n, uint8_t out[GRADD_SHA256_BYTES]) {
    gradd_sha256_t hash;
    gradd_sha256_init(&hash);
    gradd_sha256_update(&hash, data, n);
    gradd_sha256_final(&hash, out);
}

static const char *hex(const uint8_t digest[GRADD_SHA256_BYTES]) {
    static char text[2 * GRADD_SHA256_BYTES + 1];
    for (int i = 0; i < GRADD_SHA256_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return text;
}

static const char *hex_of(const char *message) {
    uint8_t digest[GRADD_SHA256_BYTES];
    digest_of(message, strlen(message), digest);
    return hex(digest);
}

TEST(standard_vectors) {
    CHECK_EQ_STR(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ_STR(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ_STR(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ_STR(hex_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                        "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
                 "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
}

TEST(million_letters) {
    gradd_sha256_t hash;
    uint8_t digest[GRADD_SHA256_BYTES];
    char block[1000];
    memset(block, 'a', sizeof block);
    gradd_sha256_init(&hash);
    for (int i = 0; i < 1000; i++)
        gradd_sha256_update(&hash, block, sizeof block);
    gradd_sha256_final(&hash, digest);
    CHECK_EQ_STR(hex(digest), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(splits_do_not_matter) {
    uint8_t data[200], whole[GRADD_SHA256_BYTES], parts[GRADD_SHA256_BYTES];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    for (size_t n = 0; n <= sizeof data; n++) {
        digest_of(data, n, whole);
        for (size_t cut = 0; cut <= n; cut += 13) {
            gradd_sha256_t hash;
            gradd_sha256_init(&hash);
            gradd_sha256_update(&hash, data, cut);
            gradd_sha256_update(&hash, data + cut, n - cut);
            gradd_sha256_final(&hash, parts);
            CHECK(memcmp(whole, parts, sizeof whole) == 0);
        }
    }
}
