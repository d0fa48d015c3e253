/* The loops, compiled once for each instruction set. Plain C that compilers vectorize.
 *
 * Bit for bit what the numpy forms in the codecs and in optim/outer.py do: every operation is rounded
 * to float32 by itself, in the same order. The build forbids contraction into fused multiply-adds.
 */
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

#include "body_blocks.h"
#include "body_flat.h"
#include "body_topk.h"

#define BLOCK_CODEC(NAME, BLOCK, BITS) \
    { #NAME, BLOCK, BITS, encode_##NAME, check_##NAME, decode_##NAME, decode_add_##NAME }
#define RULE(NAME) { #NAME, NAME##_float32, NAME##_float64 }

#define KERNELS_TABLE(LEVEL)                                                              \
    const kernels kernels_##LEVEL = {                                                     \
        #LEVEL,                                                                           \
        {BLOCK_CODEC(float32, 0, 32), BLOCK_CODEC(int8, 256, 8), BLOCK_CODEC(int4, 64, 4), \
         BLOCK_CODEC(fp4_e3m0, 64, 4)},                                                   \
        {RULE(nesterov), RULE(heavy_ball), RULE(sgd)},                                    \
        weigh,                                                                            \
        select_top,                                                                       \
        pack12,                                                                           \
        unpack12,                                                                         \
        pack2,                                                                            \
        unpack2,                                                                          \
    }
