/* The kernels for every processor of the kind that the build is for. */
#define VECTOR_BYTES 16
#include "kernels_body.h"

KERNELS_TABLE(base);
