/* See dispatch.h. */
#include "kernels/describe/dispatch.h"

bool gradd_narrow;
