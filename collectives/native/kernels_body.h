/* The loops, compiled once for each instruction set. Plain C that compilers vectorize.
 *
 * Bit for bit what the numpy forms in the codecs and in optim/outer_step.py do: every operation is rounded
 * to float32 by itself, in the same order. The build forbids contraction into fused multiply-adds; only
 * an estimate that is looked at again where it is close asks for them.
 * VECTOR_BYTES is the width of the instruction set's vectors.
 */
#include <math.h>
#include <string.h>

#include "kernels.h"

#if defined(__GNUC__) || defined(__clang__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#include "body_bits.h"
#include "body_random.h"
#include "body_vectors.h"

#include "body_blocks.h"
#include "body_few.h"
#include "body_flat.h"
#include "body_gram.h"
#include "body_halves.h"
#include "body_levels.h"
#include "body_rows.h"
#include "body_sketch.h"
#include "body_topk.h"

/* A codec that differs from another in encoding only. */
#define CODEC_LIKE(NAME, OTHER)                                                           \
    {                                                                                     \
        #NAME, bytes_##OTHER, encode_##NAME, check_##OTHER, decode_##OTHER, decode_add_##OTHER \
    }
#define CODEC(NAME) CODEC_LIKE(NAME, NAME)
#define RULE(NAME) { #NAME, NAME##_float32, NAME##_float64 }

#define KERNELS_TABLE(LEVEL)                                                          \
    const kernels kernels_##LEVEL = {                                                 \
        #LEVEL,                                                                       \
        {CODEC(float32), CODEC(bfloat16), CODEC(float16), CODEC(int8),                \
         CODEC_LIKE(int8_sr, int8), CODEC(int8_shift), CODEC(int4),                   \
         CODEC_LIKE(int4_sr, int4), CODEC(int4_shift), CODEC(fp4_e3m0),               \
         CODEC(fp8_e4m3), CODEC(fp8_e5m2), CODEC(dynamic8), CODEC(int2), CODEC(sign), \
         CODEC(topk)},                                                                \
        {RULE(nesterov), RULE(heavy_ball), RULE(sgd)},                                \
        weigh, mix_rows, order_rows, gram, sketch, squares, peaks,                    \
    }
