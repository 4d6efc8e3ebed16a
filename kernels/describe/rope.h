/* The contract of Rope and RopeApart: the order of operands and the names of attributes. Passes
 * write these nodes, every device's kernels read them. The mathematics is in
 * kernels/ops/attention/rope.c.
 */
#ifndef GRADD_KERNELS_DESCRIBE_ROPE_H
#define GRADD_KERNELS_DESCRIBE_ROPE_H

enum { GRADD_ROPE_X, GRADD_ROPE_COS, GRADD_ROPE_SIN, GRADD_ROPE_INPUTS };

/* Attributes, all of them 0 or 1; RopeApart has the first two. */
#define GRADD_ROPE_TRANSPOSED  "transposed"  /* the gradient: columns change places */
#define GRADD_ROPE_INVERSE     "inverse"     /* turns the other way */
#define GRADD_ROPE_INTERLEAVED "interleaved" /* pairs are neighbours, not halves */
#define GRADD_ROPE_SHARED      "shared"      /* both of a pair have one angle */
#define GRADD_ROPE_ATTRS       4             /* how many there are */
#define GRADD_ROPE_APART_ATTRS 2             /* of RopeApart */

#endif
