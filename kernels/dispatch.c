/* See dispatch.h. */
#include "kernels/dispatch.h"

bool gradd_narrow;
