/* Looking through casts, and choosing operands of the right width. Models in bf16 or f16 calculate
 * some parts in f32, with casts around and between them; the operators that stand for such a part
 * do that themselves. `as` is the element type that the operator would have: one in a half takes
 * the place of casts between that half and f32 in either direction, any other only of those that
 * keep the value. A model that rounds to a half in the middle of f32, or computes a part of it in
 * f64, keeps that.
 */
#ifndef GRADD_SERVER_GRAPH_MATCH_MATCH_CAST_H
#define GRADD_SERVER_GRAPH_MATCH_MATCH_CAST_H

#include "server/graph/match/match.h"
#include "server/graph/readers.h"

/* The operand of the cast that makes v, if it is one; else GRADD_NONE. */
gradd_val_t match_under_cast(const graph_t *g, gradd_val_t v, gradd_dtype_t as);
/* The value in front of all such casts. */
gradd_val_t match_uncast(const graph_t *g, gradd_val_t v, gradd_dtype_t as);
/* Whether v, and everything between it and what is in front of its casts, has one reader. */
bool match_uncast_read_once(const graph_t *g, gradd_val_t v, gradd_dtype_t as,
                            const graph_readers_t *readers);
/* The same, but v itself may have several readers if all of them multiply it from the left. */
bool match_uncast_read_by_products(const graph_t *g, gradd_val_t v, gradd_dtype_t as,
                                   const graph_readers_t *readers);
/* Whether two values are the same but for casts. */
bool match_same_uncast(const graph_t *g, gradd_val_t a, gradd_val_t b, gradd_dtype_t as);
/* v, or what it was cast from without losing anything, of that element type; GRADD_NONE if neither
 * is. */
gradd_val_t match_of_dtype(const graph_t *g, gradd_val_t v, gradd_dtype_t dtype);
/* Scale or bias for a normalisation of x: a vector over the last axis, of x's type or f32 beside
 * a half. GRADD_NONE if v is none. */
gradd_val_t match_row_vector(const graph_t *g, gradd_val_t v, gradd_val_t x);

#endif
