/* The kernels for x86 processors with AVX2. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(HAVE_X86_LEVELS)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

#define VECTOR_BYTES 32
#define DOUBLES_AT(VALUES) _mm256_cvtps_pd(_mm_loadu_ps(VALUES))
#include "kernels_body.h"

KERNELS_TABLE(avx2);

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int kernels_for_another_processor; /* C wants something in every file */
#endif
