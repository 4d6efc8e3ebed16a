/* Tests of kernels/math/rng: published Philox vectors, groups against single words, distribution.
 */
#include "tests/test.h"

#include "kernels/math/rng.h"

/* Known answers of Philox4x32-10, from the test vectors of its authors' library Random123. */
TEST(cipher_gives_the_published_vectors) {
    static const struct {
        uint64_t seed;
        uint32_t in[4], out[4];
    } known[] = {
        {0,                  {0, 0, 0, 0},                 {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {0xffffffffffffffff,
         {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}                                                  },
        {0x299f31d0a4093822,
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}                                                  },
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        gradd_philox(known[i].seed, known[i].in, out);
        for (int k = 0; k < 4; k++)
            CHECK_EQ_INT(out[k], known[i].out[k]);
    }
}

TEST(groups_equal_single_words) {
    for (uint64_t group = 0; group < 40; group++) {
        uint32_t words[GRADD_RNG_GROUP];
        uint64_t far = group < 20 ? group : group * 0x123456789abu;
        gradd_rng_group(0x1234567890abcdef, 1 + group % 3, far, words);
        for (uint64_t i = 0; i < GRADD_RNG_GROUP; i++)
            CHECK_EQ_INT(words[i], gradd_rng_word(0x1234567890abcdef, 1 + group % 3, far * 64 + i));
    }
}

TEST(coordinates_are_independent) {
    int same_seed = 0, same_node = 0, same_element = 0;
    for (uint64_t i = 0; i < 10000; i++) {
        uint32_t word = gradd_rng_word(7, 3, i);
        same_seed += word == gradd_rng_word(8, 3, i);
        same_node += word == gradd_rng_word(7, 4, i);
        same_element += word == gradd_rng_word(7, 3, i + 1);
    }
    CHECK(same_seed + same_node + same_element <= 1);
}

TEST(words_are_uniform) {
    enum { N = 1 << 18, BINS = 64 };
    int bins[BINS] = {0};
    double sum = 0;
    for (uint64_t g = 0; g < N / 64; g++) {
        uint32_t words[GRADD_RNG_GROUP];
        gradd_rng_group(42, 5, g, words);
        for (int i = 0; i < 64; i++) {
            bins[words[i] >> 26]++;
            sum += gradd_rng_uniform(words[i]);
        }
    }
    double chi = 0, expected = (double)N / BINS;
    for (int i = 0; i < BINS; i++)
        chi += (bins[i] - expected) * (bins[i] - expected) / expected;
    CHECK_NEAR(sum / N, 0.5, 0.002);
    CHECK(chi > 25 && chi < 120); /* 63 degrees of freedom: 63 +- 11 */
}
