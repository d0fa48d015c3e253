/* bfloat16 and float16: two bytes for each element. The numpy forms are in codecs/plain.py. Included
 * by kernels_body.h.
 *
 * What is beyond the largest finite number is clamped to it before it is rounded, so no rounding
 * carries into infinity. */

#define BFLOAT16_TOP 0x7F7F0000 /* 2^128 - 2^120, as float32's bits */
#define FLOAT16_TOP 0x477FE000  /* 65504 */
#define FLOAT16_LEAST 0x38800000 /* 2^-14, its smallest normal number */
#define FLOAT16_BIAS (112 << 23) /* float32's exponents are so much larger */
/* Floats from 0.5 to 1 are 2^-24 apart, as float16's subnormal numbers are: the addition rounds, and
 * what comes above the bits of 0.5 counts the steps. */
#define FLOAT16_STEPS 0.5f

enum half { BFLOAT16, FLOAT16 };

INLINE uint16_t half_of(enum half kind, int32_t magnitude)
{
    if (kind == BFLOAT16) {
        int32_t clamped = magnitude < BFLOAT16_TOP ? magnitude : BFLOAT16_TOP;
        return (uint16_t)((clamped + 0x7FFF + (clamped >> 16 & 1)) >> 16);
    }
    int32_t clamped = magnitude < FLOAT16_TOP ? magnitude : FLOAT16_TOP;
    int32_t normal = (clamped - FLOAT16_BIAS + 0xFFF + (clamped >> 13 & 1)) >> 13;
    int32_t subnormal = bits_of(float_of(clamped) + FLOAT16_STEPS) - bits_of(FLOAT16_STEPS);
    int32_t small = -(clamped < FLOAT16_LEAST);
    return (uint16_t)((subnormal & small) | (normal & ~small));
}

INLINE float float_of_half(enum half kind, uint16_t half)
{
    if (kind == BFLOAT16)
        return float_of((int32_t)((uint32_t)half << 16));
    int32_t magnitude = half & 0x7FFF;
    int32_t normal = (magnitude << 13) + FLOAT16_BIAS;
    int32_t subnormal = bits_of(float_of(magnitude + bits_of(FLOAT16_STEPS)) - FLOAT16_STEPS);
    int32_t small = -(magnitude < 0x400);
    int32_t bits = (subnormal & small) | (normal & ~small);
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(half & 0x8000) << 16));
}

INLINE uint16_t half_at(const uint8_t *data, size_t index)
{
    uint16_t half;
    memcpy(&half, data + sizeof half * index, sizeof half);
    return half;
}

INLINE int encode_halves(enum half kind, const float *restrict values, size_t count,
                         uint8_t *restrict out)
{
    int32_t top = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(values[i]), magnitude = bits & MAGNITUDE_BITS;
        uint16_t sign = (uint16_t)((uint32_t)bits >> 16 & 0x8000);
        uint16_t half = (uint16_t)(half_of(kind, magnitude) | sign);
        memcpy(out + sizeof half * i, &half, sizeof half);
        top = magnitude > top ? magnitude : top;
    }
    return top < INFINITY_BITS;
}

INLINE int check_halves(enum half kind, const uint8_t *restrict data, size_t count)
{
    const uint16_t infinity = kind == BFLOAT16 ? 0x7F80 : 0x7C00;
    uint16_t wrong = 0;
    for (size_t i = 0; i < count; i++)
        wrong |= (uint16_t)((half_at(data, i) & infinity) == infinity);
    return !wrong;
}

INLINE void decode_halves(enum half kind, int add, const uint8_t *restrict data, size_t count,
                          float factor, float *restrict out)
{
    for (size_t i = 0; i < count; i++) {
        float value = float_of_half(kind, half_at(data, i));
        if (add) {
            value = value * factor;
            out[i] = out[i] + value;
        } else {
            out[i] = value;
        }
    }
}

#define HALF_FUNCTIONS(NAME, KIND)                                                            \
    static size_t bytes_##NAME(size_t count)                                                  \
    {                                                                                         \
        return 2 * count;                                                                     \
    }                                                                                         \
    static int encode_##NAME(const float *values, size_t count, uint64_t key, uint8_t *out)   \
    {                                                                                         \
        (void)key;                                                                            \
        return encode_halves(KIND, values, count, out);                                       \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_halves(KIND, data, count);                                               \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t total, size_t lo, size_t count,     \
                              float *out)                                                     \
    {                                                                                         \
        (void)total;                                                                          \
        decode_halves(KIND, 0, data + 2 * lo, count, 0.0f, out);                              \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_halves(KIND, 1, data, count, factor, into);                                    \
    }

HALF_FUNCTIONS(bfloat16, BFLOAT16)
HALF_FUNCTIONS(float16, FLOAT16)
