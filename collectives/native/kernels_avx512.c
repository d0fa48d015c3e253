/* The kernels for x86 processors with AVX-512, as of 2017: with BW, DQ and VL. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(HAVE_X86_LEVELS)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define VECTOR_BYTES 64
#define DOUBLES_AT(VALUES) _mm512_cvtps_pd(_mm256_loadu_ps(VALUES))
#include "kernels_body.h"

KERNELS_TABLE(avx512);

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int kernels_for_another_processor; /* C wants something in every file */
#endif
