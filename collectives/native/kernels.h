/* What a set of kernels offers, and what it is chosen from.
 *
 * One file of loops (kernels_body.h) is compiled once for every instruction set; each compilation
 * gives one table. They all give the same bits, which the tests check for each that the machine has.
 *
 * Nothing here knows Python. Callers have checked every length, alignment and overlap (module.c),
 * so no kernel can fail but by what the values are; each says so with 0 and the others give 1.
 */
#ifndef ATOLL_KERNELS_H
#define ATOLL_KERNELS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>

/* The encoded bytes are little-endian, and they are read and written as they lie in memory. Rounding
 * must be float32's own after every operation. Where that does not hold numpy is used. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels need a little-endian machine"
#endif
#if defined(__FAST_MATH__)
#error "the kernels must not be compiled with -ffast-math"
#endif
#if FLT_EVAL_METHOD != 0
#error "the kernels need float32 arithmetic without excess precision"
#endif

/* One way to write float32 values as bytes. Encoded bytes may have any alignment; floats have theirs.
 * No two buffers overlap. */
typedef struct {
    const char *name;
    size_t (*encoded_bytes)(size_t count);
    /* 0 if a value is NaN or infinite; `out` then holds anything. Those that round at random take
     * the key. */
    int (*encode)(const float *values, size_t count, uint64_t key, uint8_t *out);
    /* 0 unless the bytes are ones that encode may have written. */
    int (*check)(const uint8_t *data, size_t count);
    /* Of what has passed `check`, and encodes `total` elements, the `count` from `lo` on: from the
     * first of a piece to the end of one or of all. */
    void (*decode)(const uint8_t *data, size_t total, size_t lo, size_t count, float *out);
    void (*decode_add)(const uint8_t *data, size_t count, float factor, float *into);
} codec_kernels;

/* A piece has whole blocks of every codec. */
enum { CODECS = 16, RULES = 3, PIECE = 4096, ROWS_MAX = 256, BUCKETS = 8 };

/* An outer step. Inputs and outputs: theta with theta and momentum with momentum may be the same
 * memory; otherwise nothing overlaps. */
typedef void (*step32)(const float *theta, const float *momentum, const float *delta, size_t count,
                       float lr, float mu, float *out_theta, float *out_momentum);
typedef void (*step64)(const double *theta, const double *momentum, const double *delta,
                       size_t count, double lr, double mu, double *out_theta,
                       double *out_momentum);

typedef struct {
    const char *name;
    step32 float32;
    step64 float64;
} rule_kernels;

typedef struct {
    const char *level;
    codec_kernels codecs[CODECS];
    rule_kernels rules[RULES];
    /* Weighted values (float32, at any address) into a sum: += or, for the first, =. 0 if a value
     * or a sum is NaN or infinite; `into` then holds anything. */
    int (*weigh)(const uint8_t *data, size_t count, float factor, float *into, int first);
    /* What robust rules do with n rows of `count` values, n and k at most ROWS_MAX: see body_rows.h
     * and body_gram.h. */
    void (*mix)(const float *rows, size_t n, size_t count, const float *coefficients, size_t k,
                float *out);
    void (*order)(const float *rows, size_t n, size_t count, const float *coefficients, size_t k,
                  const uint8_t *network, size_t pairs, size_t first, size_t keep, int around,
                  float *out);
    void (*gram)(const float *rows, size_t n, size_t count, double *total);
    /* Sums in BUCKETS buckets, for audits: see body_sketch.h. */
    void (*sketch)(const float *values, size_t count, const uint8_t *bits, double *out);
    void (*squares)(const float *values, const float *other, size_t count, double *out);
    void (*peaks)(const float *values, size_t count, size_t block, float *out);
} kernels;

/* dynamic8: see dynamic.c and body_levels.h. A key is the exponent and the first six bits of the
 * mantissa, from 2^-23, below which all is zero, to 1. */
enum {
    DYNAMIC_REST_BITS = 17,
    DYNAMIC_REST = (1 << DYNAMIC_REST_BITS) - 1,
    DYNAMIC_FIRST_KEY = (127 - 23) << (23 - DYNAMIC_REST_BITS),
    DYNAMIC_KEYS = (23 << (23 - DYNAMIC_REST_BITS)) + 1,
    DYNAMIC_COUNT_BITS = 8,
    DYNAMIC_COUNT = (1 << DYNAMIC_COUNT_BITS) - 1,
};
extern const float dynamic_levels[256];
extern int32_t dynamic_entries[DYNAMIC_KEYS];
void dynamic_start(void); /* before anything else of it */

extern const kernels kernels_base; /* what the compiler takes for this machine by itself */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_LEVELS 1
extern const kernels kernels_avx2, kernels_avx512;
#endif

#endif
