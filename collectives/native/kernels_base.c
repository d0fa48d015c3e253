/* The kernels for every processor of the kind that the build is for. */
#include "kernels_body.h"

KERNELS_TABLE(base);
