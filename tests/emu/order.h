/* In which order the emulation lets threads of a block go on. Environment: GRADD_EMU_ORDER, if
 * emu_set_order was not called. */
#ifndef GRADD_TESTS_EMU_ORDER_H
#define GRADD_TESTS_EMU_ORDER_H

#ifdef __cplusplus
extern "C" {
#endif

/* 0 one turn each, by number; 1 the same backwards; 2 and 3 likewise, but each warp as far as it
 * gets before the next, which finds memory that is used again too early; from 4 on a number that
 * draws a new order for each round, odd: by warps. */
void emu_set_order(long order);
/* How often one thread has taken over from another since the last call. */
long emu_switches(void);

#ifdef __cplusplus
}
#endif
#endif
