/* Codecs with a scale for each block: int8, int4 and fp4_e3m0.
 *
 * All scales come first, then all codes. scale = largest magnitude / code range, at most the largest
 * scale, and 0 where that is below the smallest. Included by kernels_body.h.
 */

enum { INT8_BLOCK = 256, NIBBLE_BLOCK = 64 };
enum kind { INT8, INT4, E3M0 };

#define MAGNITUDE_BITS 0x7FFFFFFF
#define INFINITY_BITS 0x7F800000

/* Added to a float below 2^22 it leaves the nearest integer, ties to even, in the low bits: between
 * 2^23 and 2^24 floats are one apart. It is rint and the conversion in one addition. */
#define ROUNDING 12582912.0f

/* The largest scale is one step under the largest float / range, so that range * scale cannot round
 * to infinity. With the smallest one everything that is decoded is 0 or a normal number. */
#define INT8_RANGE 127.0f
#define INT8_SCALE_MIN FLT_MIN
#define INT8_SCALE_MAX 0x1.020406p+121f
#define INT4_RANGE 7.0f
#define INT4_SCALE_MIN FLT_MIN
#define INT4_SCALE_MAX 0x1.249246p+125f
#define E3M0_RANGE 16.0f
#define E3M0_SCALE_MIN (4 * FLT_MIN)
#define E3M0_SCALE_MAX 0x1.fffffcp+123f

INLINE int32_t bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float range_of(enum kind kind)
{
    return kind == INT8 ? INT8_RANGE : kind == INT4 ? INT4_RANGE : E3M0_RANGE;
}

INLINE float scale_min_of(enum kind kind)
{
    return kind == INT8 ? INT8_SCALE_MIN : kind == INT4 ? INT4_SCALE_MIN : E3M0_SCALE_MIN;
}

INLINE float scale_max_of(enum kind kind)
{
    return kind == INT8 ? INT8_SCALE_MAX : kind == INT4 ? INT4_SCALE_MAX : E3M0_SCALE_MAX;
}

INLINE float scale_at(const uint8_t *data, size_t block)
{
    float scale;
    memcpy(&scale, data + sizeof scale * block, sizeof scale);
    return scale;
}

/* ---------------------------------------------------------------- encoding */

/* Magnitudes order like their bits read as integers; infinity and NaN come last. */
INLINE int32_t largest_magnitude_bits(const float *restrict values, size_t count)
{
    int32_t top = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(values[i]) & MAGNITUDE_BITS;
        top = bits > top ? bits : top;
    }
    return top;
}

/* The index of the level among 0, 2^-2, 2^-1 ... 2^4 that is nearest to a magnitude up to 16 and a
 * little; of two equally near ones that with the even index. The exponent is what counts: it is
 * rounded at half of a binade like the last bit of a mantissa. 0 and 2^-2 alone are equally far
 * apart from 2^-3. */
INLINE int32_t e3m0_index(float magnitude)
{
    int32_t bits = bits_of(magnitude);
    int32_t exponent = (bits + 0x3FFFFF + (bits >> 23 & 1)) >> 23;
    int32_t index = exponent - 124;
    int32_t lowest = magnitude > 0.125f;
    return index > lowest ? index : lowest;
}

/* One byte for each element. */
INLINE void quantize(enum kind kind, const float *restrict values, size_t count, float divisor,
                     uint8_t *restrict codes)
{
    for (size_t i = 0; i < count; i++) {
        float scaled = values[i] / divisor;
        if (kind == E3M0) {
            int32_t sign = (int32_t)((uint32_t)bits_of(values[i]) >> 31) << 3;
            codes[i] = (uint8_t)(sign | e3m0_index(float_of(bits_of(scaled) & MAGNITUDE_BITS)));
        } else {
            codes[i] = (uint8_t)(uint32_t)bits_of(scaled + ROUNDING);
        }
    }
}

/* Two nibbles to a byte, the first in the low bits; `nibbles` has an even number of bytes. */
INLINE void pack_nibbles(const uint8_t *restrict nibbles, size_t bytes, uint8_t *restrict out)
{
    for (size_t i = 0; i < bytes; i++) {
        uint16_t pair;
        memcpy(&pair, nibbles + 2 * i, sizeof pair);
        out[i] = (uint8_t)((pair & 0xF) | (pair >> 4 & 0xF0));
    }
}

INLINE int encode_block(enum kind kind, const float *restrict values, size_t count,
                        uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = largest_magnitude_bits(values, count);
    if (top >= INFINITY_BITS)
        return 0;
    float scale = float_of(top) / range_of(kind);
    scale = scale < scale_max_of(kind) ? scale : scale_max_of(kind);
    /* Where the scale is 0 the values are so small that they round to 0 when divided by 1. */
    float divisor = scale < scale_min_of(kind) ? 1.0f : scale;
    scale = scale < scale_min_of(kind) ? 0.0f : scale;
    memcpy(scale_out, &scale, sizeof scale);
    if (kind == INT8) {
        quantize(kind, values, count, divisor, codes);
    } else {
        uint8_t nibbles[NIBBLE_BLOCK];
        quantize(kind, values, count, divisor, nibbles);
        if (count % 2)
            nibbles[count] = 0; /* a short block: there is room for one more */
        pack_nibbles(nibbles, (count + 1) / 2, codes);
    }
    return 1;
}

INLINE int encode_blocks(enum kind kind, const float *restrict values, size_t count,
                         uint8_t *restrict out)
{
    const size_t width = kind == INT8 ? INT8_BLOCK : NIBBLE_BLOCK;
    const size_t code_bytes = kind == INT8 ? width : width / 2;
    size_t whole = count / width, rest = count % width;
    uint8_t *codes = out + sizeof(float) * (whole + (rest > 0));
    for (size_t block = 0; block < whole; block++)
        if (!encode_block(kind, values + width * block, width, out + sizeof(float) * block,
                          codes + code_bytes * block))
            return 0;
    return rest == 0 || encode_block(kind, values + width * whole, rest,
                                     out + sizeof(float) * whole, codes + code_bytes * whole);
}

/* ---------------------------------------------------------------- checking */

/* A scale is +0 or lies between the smallest and the largest. Bits of positive floats order like
 * integers, and negative ones, -0 among them, are negative integers. */
INLINE int scales_allowed(enum kind kind, const uint8_t *restrict data, size_t blocks)
{
    const int32_t lowest = bits_of(scale_min_of(kind)), highest = bits_of(scale_max_of(kind));
    int32_t wrong = 0;
    for (size_t block = 0; block < blocks; block++) {
        int32_t bits;
        memcpy(&bits, data + sizeof bits * block, sizeof bits);
        wrong |= (bits != 0) & ((bits < lowest) | (bits > highest));
    }
    return !wrong;
}

INLINE int codes_allowed(enum kind kind, const uint8_t *restrict codes, size_t count)
{
    uint8_t wrong = 0;
    if (kind == INT8) {
        for (size_t i = 0; i < count; i++)
            wrong |= codes[i] == 0x80; /* -128 */
        return !wrong;
    }
    size_t bytes = (count + 1) / 2;
    if (kind == INT4)
        for (size_t i = 0; i < bytes; i++)
            wrong |= ((codes[i] & 0x0F) == 0x08) | ((codes[i] & 0xF0) == 0x80); /* -8 */
    if (count % 2)
        wrong |= codes[bytes - 1] >> 4 != 0;
    return !wrong;
}

INLINE int check_blocks(enum kind kind, const uint8_t *restrict data, size_t count)
{
    const size_t width = kind == INT8 ? INT8_BLOCK : NIBBLE_BLOCK;
    size_t blocks = count / width + (count % width > 0);
    return scales_allowed(kind, data, blocks) &&
           codes_allowed(kind, data + sizeof(float) * blocks, count);
}

/* ---------------------------------------------------------------- decoding */

/* A byte for each element: int4 with its sign, fp4_e3m0 as it is. */
INLINE void unpack_nibbles(enum kind kind, const uint8_t *restrict codes, size_t bytes,
                           uint8_t *restrict nibbles)
{
    for (size_t i = 0; i < bytes; i++) {
        uint16_t pair = (uint16_t)((codes[i] & 0x0F) | (codes[i] & 0xF0) << 4);
        memcpy(nibbles + 2 * i, &pair, sizeof pair);
    }
    if (kind == INT4)
        for (size_t i = 0; i < 2 * bytes; i++)
            nibbles[i] = (uint8_t)((nibbles[i] ^ 8) - 8);
}

INLINE float level_of(enum kind kind, uint8_t code)
{
    if (kind != E3M0)
        return (float)(int8_t)code;
    int32_t index = code & 7;
    int32_t bits = index ? (index + 124) << 23 : 0;
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(code & 8) << 28));
}

INLINE void decode_block(enum kind kind, int add, float scale, const uint8_t *restrict codes,
                         size_t count, float factor, float *restrict out)
{
    uint8_t nibbles[NIBBLE_BLOCK];
    if (kind != INT8) {
        unpack_nibbles(kind, codes, (count + 1) / 2, nibbles);
        codes = nibbles;
    }
    for (size_t i = 0; i < count; i++) {
        float value = level_of(kind, codes[i]) * scale;
        if (add) {
            value = value * factor;
            out[i] = out[i] + value;
        } else {
            out[i] = value;
        }
    }
}

INLINE void decode_blocks(enum kind kind, int add, const uint8_t *restrict data, size_t count,
                          float factor, float *restrict out)
{
    const size_t width = kind == INT8 ? INT8_BLOCK : NIBBLE_BLOCK;
    const size_t code_bytes = kind == INT8 ? width : width / 2;
    size_t whole = count / width, rest = count % width;
    const uint8_t *codes = data + sizeof(float) * (whole + (rest > 0));
    for (size_t block = 0; block < whole; block++)
        decode_block(kind, add, scale_at(data, block), codes + code_bytes * block, width, factor,
                     out + width * block);
    if (rest)
        decode_block(kind, add, scale_at(data, whole), codes + code_bytes * whole, rest, factor,
                     out + width * whole);
}

/* ---------------------------------------------------------------- by name */

#define BLOCK_FUNCTIONS(NAME, KIND)                                                           \
    static int encode_##NAME(const float *values, size_t count, uint8_t *out)                 \
    {                                                                                         \
        return encode_blocks(KIND, values, count, out);                                       \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_blocks(KIND, data, count);                                               \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t count, float *out)                  \
    {                                                                                         \
        decode_blocks(KIND, 0, data, count, 0.0f, out);                                       \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_blocks(KIND, 1, data, count, factor, into);                                    \
    }

BLOCK_FUNCTIONS(int8, INT8)
BLOCK_FUNCTIONS(int4, INT4)
BLOCK_FUNCTIONS(fp4_e3m0, E3M0)
