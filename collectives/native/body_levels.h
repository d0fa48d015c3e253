/* fp8_e4m3, fp8_e5m2 and dynamic8: a byte for each element, the nearest of uneven levels. The numpy forms
 * are in codecs/levels.py, and those of the scales in codecs/scales.py. Included by kernels_body.h.
 *
 * All scales come first, then all codes. */

/* ---------------------------------------------------------------- fp8: small floats
 *
 * Block of 32, one scale of E8M0: 2^(byte - 127), and 0 for byte 0. Codes are sign and magnitude. A
 * magnitude is rounded like the last bit of a mantissa; below the smallest normal level by an addition
 * to `steps`, among floats as far apart as the levels are there. What is larger than the top takes it. */

enum { SMALL_BLOCK = 32 };

typedef struct {
    int shift;          /* mantissa bits that float32 has more */
    int32_t bias;       /* of a level's index, above the bits that are left */
    int32_t normal;     /* the smallest normal level, as float32's bits */
    float steps;
    int32_t top;        /* index of the largest level: codes beyond are NaN or infinite */
    int32_t exponent;   /* of the largest level */
    uint8_t scale_min, scale_max;
} small_float;

static const small_float E4M3 = {20, 120 << 3, (127 - 6) << 23, 0x1p14f, 0x7E, 8, 10, 246};
static const small_float E5M2 = {21, 112 << 2, (127 - 14) << 23, 0x1p7f, 0x7B, 15, 17, 239};

INLINE uint8_t small_code(const small_float *form, float scaled)
{
    int32_t bits = bits_of(scaled), magnitude = bits & MAGNITUDE_BITS;
    int32_t half = (1 << (form->shift - 1)) - 1;
    int32_t normal = ((magnitude + half + (magnitude >> form->shift & 1)) >> form->shift) - form->bias;
    int32_t subnormal = bits_of(float_of(magnitude) + form->steps) - bits_of(form->steps);
    int32_t small = -(magnitude < form->normal);
    int32_t index = (subnormal & small) | (normal & ~small);
    index = index < form->top ? index : form->top;
    return (uint8_t)(index | (int32_t)((uint32_t)bits >> 24 & 0x80));
}

INLINE float small_level(const small_float *form, uint8_t code)
{
    int32_t index = code & 0x7F;
    int32_t normal = (index + form->bias) << form->shift;
    int32_t subnormal = bits_of(float_of(index + bits_of(form->steps)) - form->steps);
    int32_t small = -(normal < form->normal);
    int32_t bits = (subnormal & small) | (normal & ~small);
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(code & 0x80) << 24));
}

INLINE int encode_small_block(const small_float *form, const float *restrict values, size_t count,
                              uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = largest_magnitude_bits(values, count);
    if (top >= INFINITY_BITS)
        return 0;
    int32_t scale = (top >> 23) - form->exponent;
    scale = scale < form->scale_min ? 0 : scale;
    *scale_out = (uint8_t)scale;
    /* Where the scale is 0 the values are so small that they round to 0 when divided by 1. To
     * divide by a power of two is to multiply with the opposite one. */
    float factor = float_of((254 - (scale ? scale : 127)) << 23);
    for (size_t i = 0; i < count; i++)
        codes[i] = small_code(form, values[i] * factor);
    return 1;
}

INLINE size_t small_blocks(size_t count)
{
    return count / SMALL_BLOCK + (count % SMALL_BLOCK != 0);
}

INLINE int encode_small(const small_float *form, const float *restrict values, size_t count,
                        uint8_t *restrict out)
{
    size_t whole = count / SMALL_BLOCK, rest = count % SMALL_BLOCK;
    uint8_t *codes = out + small_blocks(count);
    for (size_t block = 0; block < whole; block++)
        if (!encode_small_block(form, values + SMALL_BLOCK * block, SMALL_BLOCK, out + block,
                                codes + SMALL_BLOCK * block))
            return 0;
    return rest == 0 || encode_small_block(form, values + SMALL_BLOCK * whole, rest, out + whole,
                                           codes + SMALL_BLOCK * whole);
}

INLINE int check_small(const small_float *form, const uint8_t *restrict data, size_t count)
{
    size_t blocks = small_blocks(count);
    const uint8_t *codes = data + blocks;
    uint8_t wrong = 0;
    for (size_t block = 0; block < blocks; block++)
        wrong |= (data[block] != 0) & ((data[block] < form->scale_min) | (data[block] > form->scale_max));
    for (size_t i = 0; i < count; i++)
        wrong |= (codes[i] & 0x7F) > form->top;
    return !wrong;
}

INLINE void decode_small(const small_float *form, int add, const uint8_t *restrict data, size_t total,
                         size_t lo, size_t count, float factor, float *restrict out)
{
    const uint8_t *scales = data + lo / SMALL_BLOCK, *codes = data + small_blocks(total) + lo;
    for (size_t first = 0; first < count; first += SMALL_BLOCK) {
        size_t width = count - first < SMALL_BLOCK ? count - first : SMALL_BLOCK;
        float scale = float_of((int32_t)scales[first / SMALL_BLOCK] << 23);
        for (size_t i = first; i < first + width; i++) {
            float value = small_level(form, codes[i]) * scale;
            if (add) {
                value = value * factor;
                out[i] = out[i] + value;
            } else {
                out[i] = value;
            }
        }
    }
}

#define SMALL_FUNCTIONS(NAME, FORM)                                                           \
    static size_t bytes_##NAME(size_t count)                                                  \
    {                                                                                         \
        return small_blocks(count) + count;                                                   \
    }                                                                                         \
    static int encode_##NAME(const float *values, size_t count, uint64_t key, uint8_t *out)   \
    {                                                                                         \
        (void)key;                                                                            \
        return encode_small(&FORM, values, count, out);                                       \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_small(&FORM, data, count);                                               \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t total, size_t lo, size_t count,     \
                              float *out)                                                     \
    {                                                                                         \
        decode_small(&FORM, 0, data, total, lo, count, 0.0f, out);                            \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_small(&FORM, 1, data, count, 0, count, factor, into);                          \
    }

SMALL_FUNCTIONS(fp8_e4m3, E4M3)
SMALL_FUNCTIONS(fp8_e5m2, E5M2)

/* ---------------------------------------------------------------- dynamic8
 *
 * Block of 256, one float32 scale: the value of largest magnitude, with its sign. Codes count the levels
 * from the lowest. How many positive levels a magnitude has passed is looked up by its leading bits
 * (dynamic.c). */

enum { DYNAMIC_BLOCK = 256, DYNAMIC_ZERO = 127 };
#define DYNAMIC_SCALE_MIN 0x1p-105f /* with it the smallest level is a normal number */

/* The code of a scaled value from -1 to 1. */
INLINE int32_t dynamic_code(float scaled)
{
    int32_t negative = -(bits_of(scaled) < 0), magnitude = bits_of(scaled) & MAGNITUDE_BITS;
    int32_t key = (magnitude >> DYNAMIC_REST_BITS) - DYNAMIC_FIRST_KEY;
    key = key > 0 ? key : 0; /* smaller ones are zero as well */
    int32_t entry = dynamic_entries[key];
    int32_t passed = (entry & DYNAMIC_COUNT) +
                     ((magnitude & DYNAMIC_REST) > entry >> DYNAMIC_COUNT_BITS);
    int32_t most = DYNAMIC_ZERO + 1 + negative; /* -1 is no level */
    passed = passed < most ? passed : most;
    return DYNAMIC_ZERO + ((passed ^ negative) - negative);
}

INLINE void look_up_codes(const float *restrict values, size_t count, float divisor,
                          uint8_t *restrict codes)
{
    for (size_t i = 0; i < count; i++)
        codes[i] = (uint8_t)dynamic_code(values[i] / divisor);
}

/* In wide vectors, arithmetic takes less time than to look up each element. A decade's levels are
 * evenly spaced, so how many of them a magnitude has passed is the integer part of a polygon: a line
 * for each decade, and one between two of them, where the space between two levels is between theirs.
 * Spaces grow, so it is the least of the lines; but the last level, 1, is nearer to the one before it.
 *
 * The estimate is off by less than 2^-15, whatever is rounded, fused, or multiplied by a reciprocal.
 * Where it is near an integer, or below all lines, the whole group is looked up: bits do not change. */
#if VECTOR_BYTES == 64
#define LINE(AT, SLOPE, START) __builtin_fmaf(AT, SLOPE, START)
#define LESS(A, B) ((A) < (B) ? (A) : (B))
#define MORE(A, B) ((A) > (B) ? (A) : (B))
enum { ESTIMATED = 32, HELD_BITS = 11 };
#define HELD 0x1.8p12f                /* with it, a float has HELD_BITS after the point */
#define ESTIMATE_NEAR 0x1p-11f
#define ESTIMATE_MIN 1.3e-4f          /* above the threshold of the lowest decade that has a line */
#define ESTIMATE_DIVISOR_MAX 0x1p125f /* its reciprocal is a normal number */

/* The code of a scaled value, shifted by HELD_BITS; `doubt` has bits from there on if it may not be. */
INLINE int32_t estimated_code(float scaled, int32_t *doubt)
{
    float at = float_of(bits_of(scaled) & MAGNITUDE_BITS);
    /* The number of levels that are passed, less a half. */
    float passed = MORE(LINE(at, 200.0f, -71.7968679f), LINE(at, 71.1111111f, 56.3888889f));
    passed = LESS(passed, LINE(at, 177.777778f, 45.2222222f)); /* between decades */
    passed = LESS(passed, LINE(at, 355.555556f, 27.9444444f));
    passed = LESS(passed, LINE(at, 888.888889f, 22.1111111f)); /* between decades */
    passed = LESS(passed, LINE(at, 1777.77778f, 13.7222222f));
    passed = LESS(passed, LINE(at, 4444.44444f, 10.5555556f)); /* between decades */
    passed = LESS(passed, LINE(at, 8888.88889f, 6.61111111f));
    float counted = float_of(bits_of(passed) | (bits_of(scaled) & ~MAGNITUDE_BITS));
    counted = MORE(counted, -127.25f); /* -1 is no level */
    int32_t code = bits_of(counted + (HELD + DYNAMIC_ZERO + 0.5f - ESTIMATE_NEAR));
    *doubt |= code ^ bits_of(counted + (HELD + DYNAMIC_ZERO + 0.5f + ESTIMATE_NEAR));
    int32_t small = -(at < ESTIMATE_MIN);
    *doubt |= bits_of(at) & small; /* 0 is no doubt */
    return (code & ~small) | (DYNAMIC_ZERO << HELD_BITS & small);
}

INLINE size_t estimate_codes(const float *restrict values, size_t count, float divisor,
                             uint8_t *restrict codes)
{
    float factor = 1.0f / divisor;
    size_t first = 0;
    for (; first + ESTIMATED <= count; first += ESTIMATED) {
        int32_t doubt = 0;
        for (size_t i = first; i < first + ESTIMATED; i++)
            codes[i] = (uint8_t)(estimated_code(values[i] * factor, &doubt) >> HELD_BITS);
        if (doubt >> HELD_BITS)
            look_up_codes(values + first, ESTIMATED, divisor, codes + first);
    }
    return first;
}
#endif

INLINE int encode_dynamic_block(const float *restrict values, size_t count,
                                uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = 0, highest = -1;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(values[i]), magnitude = bits & MAGNITUDE_BITS;
        top = top > magnitude ? top : magnitude;
        highest = highest > bits ? highest : bits; /* negative bits are negative values */
    }
    if (top >= INFINITY_BITS)
        return 0;
    float scale = float_of(top), divisor = 1.0f;
    if (scale < DYNAMIC_SCALE_MIN)
        scale = 0.0f; /* such values are so small that they round to 0 when divided by 1 */
    else
        divisor = scale = highest == top ? scale : -scale;
    memcpy(scale_out, &scale, sizeof scale);
    size_t first = 0;
#if VECTOR_BYTES == 64
    if (float_of(top) <= ESTIMATE_DIVISOR_MAX)
        first = estimate_codes(values, count, divisor, codes);
#endif
    look_up_codes(values + first, count - first, divisor, codes + first);
    return 1;
}

INLINE size_t dynamic_blocks(size_t count)
{
    return count / DYNAMIC_BLOCK + (count % DYNAMIC_BLOCK != 0);
}

static size_t bytes_dynamic8(size_t count)
{
    return sizeof(float) * dynamic_blocks(count) + count;
}

static int encode_dynamic8(const float *values, size_t count, uint64_t key, uint8_t *out)
{
    size_t whole = count / DYNAMIC_BLOCK, rest = count % DYNAMIC_BLOCK;
    uint8_t *codes = out + sizeof(float) * dynamic_blocks(count);
    (void)key;
    for (size_t block = 0; block < whole; block++)
        if (!encode_dynamic_block(values + DYNAMIC_BLOCK * block, DYNAMIC_BLOCK,
                                  out + sizeof(float) * block, codes + DYNAMIC_BLOCK * block))
            return 0;
    return rest == 0 ||
           encode_dynamic_block(values + DYNAMIC_BLOCK * whole, rest, out + sizeof(float) * whole,
                                codes + DYNAMIC_BLOCK * whole);
}

/* All codes are levels. A scale is +0, or its magnitude is at least the smallest and finite. */
static int check_dynamic8(const uint8_t *data, size_t count)
{
    int32_t wrong = 0;
    for (size_t block = 0; block < dynamic_blocks(count); block++) {
        int32_t bits = bits_of(float_at(data, block)), magnitude = bits & MAGNITUDE_BITS;
        wrong |= (bits != 0) &
                 ((magnitude < bits_of(DYNAMIC_SCALE_MIN)) | (magnitude >= INFINITY_BITS));
    }
    return !wrong;
}

INLINE void decode_dynamic(int add, const uint8_t *restrict data, size_t total, size_t lo,
                           size_t count, float factor, float *restrict out)
{
    const uint8_t *codes = data + sizeof(float) * dynamic_blocks(total) + lo;
    for (size_t first = 0; first < count; first += DYNAMIC_BLOCK) {
        size_t width = count - first < DYNAMIC_BLOCK ? count - first : DYNAMIC_BLOCK;
        float scale = float_at(data, (lo + first) / DYNAMIC_BLOCK);
        for (size_t i = first; i < first + width; i++) {
            float value = dynamic_levels[codes[i]] * scale;
            if (add) {
                value = value * factor;
                out[i] = out[i] + value;
            } else {
                out[i] = value;
            }
        }
    }
}

static void decode_dynamic8(const uint8_t *data, size_t total, size_t lo, size_t count, float *out)
{
    decode_dynamic(0, data, total, lo, count, 0.0f, out);
}

static void decode_add_dynamic8(const uint8_t *data, size_t count, float factor, float *into)
{
    decode_dynamic(1, data, count, 0, count, factor, into);
}
