/* The tests' interface to the stand-in for cuBLASLt.
 *
 * It proposes several algorithms, which add in different orders: results differ in their last
 * bits. */
#ifndef GRADD_TESTS_EMU_LT_H
#define GRADD_TESTS_EMU_LT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EMU_LT_ALGORITHMS = 4 };

typedef struct emu_lt_s {
    size_t version;   /* of the library */
    int fastest;      /* the algorithm that measuring finds; -1 = the clock says */
    int refuses_kept; /* so many algorithms that it is asked to check */
    uint32_t wants;   /* alignment that every product wants, whatever was promised; 0 = that */
    /* Calls so far: for proposals, to check an algorithm, and to multiply. */
    int proposals;
    int checks;
    int products;
    int last;       /* algorithm of the last product */
    int last_align; /* bytes that the last product's A was promised to be aligned to */
} emu_lt_t;

/* Of this process. */
emu_lt_t *emu_lt(void);

#ifdef __cplusplus
}
#endif

#endif
