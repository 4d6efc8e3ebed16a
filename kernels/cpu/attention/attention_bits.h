/* The keys that 64 queries may look at, one bit per key of a tile. Internal to attention.
 *
 * Bit i of word q is key first + i for query q. Words combine ranges, holes of the mask and
 * dropout; kernels that hold queries side by side pick one bit of 16 words with a shift and a test.
 * Queries beyond the end of the block may look at everything: their results are never read.
 *
 * A query is dead if nothing is allowed and all its scores are the same number, or zero is asked
 * for; its scores are then set to 0. It is rare if its masked keys may have a share: no allowed key
 * has a score clearly above theirs. Then it sees all keys, with the scores that the model gives
 * them. Which queries are rare is known before the scores for some (nothing is allowed, and a bias,
 * a cap, a sink or an infinite fill counts), from the largest score for others. */
#ifndef GRADD_KERNELS_CPU_ATTENTION_ATTENTION_BITS_H
#define GRADD_KERNELS_CPU_ATTENTION_ATTENTION_BITS_H

#include "kernels/cpu/attention/attention_cpu.h"

typedef struct attn_bits_s {
    int64_t from, to; /* keys that the block needs at all */
    int32_t lo[GRADD_ATTN_TILE], hi[GRADD_ATTN_TILE];
    bool holes[GRADD_ATTN_TILE]; /* the mask must be read */
    bool dead[GRADD_ATTN_TILE], rare[GRADD_ATTN_TILE];
    bool any_dead, any_rare;
    int64_t drop_group[GRADD_ATTN_TILE]; /* random group whose bits drop_next holds; -1 = none */
    uint64_t drop_next[GRADD_ATTN_TILE];
    uint64_t allowed[GRADD_ATTN_TILE]; /* of the tile that was asked for last */
    uint64_t shown[GRADD_ATTN_TILE];   /* what the mask says of dead and rare queries, else all */
    uint64_t kept[GRADD_ATTN_TILE];
} attn_bits_t;

typedef struct attn_block_s {
    int64_t b, h;     /* batch and head (of q) */
    int64_t first, n; /* queries */
} attn_block_t;

typedef enum attn_cover_e { ATTN_COVER_NONE, ATTN_COVER_SOME, ATTN_COVER_ALL } attn_cover_t;

void attn_bits_begin(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block);
/* Makes query i of the block rare. */
void attn_bits_mark(attn_bits_t *bits, const gradd_attn_t *p, int64_t i);
/* Whether some query is dead or rare; shown is set only then. */
static inline bool attn_bits_special(const attn_bits_t *bits) {
    return bits->any_dead || bits->any_rare;
}
/* Sets allowed for keys [first, first + n), n <= 64. */
attn_cover_t attn_bits_tile(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                            int64_t first, int64_t n);
/* Sets kept for the same keys; dropout must be active. */
void attn_bits_drop(attn_bits_t *bits, const gradd_attn_t *p, const attn_block_t *block,
                    int64_t first, int64_t n);

#endif
