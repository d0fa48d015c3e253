/* Codecs with a float32 scale for each block: int8 and int4, rounded in three ways, and fp4_e3m0.
 *
 * The key comes first where decoding needs it, then all scales, then all codes. scale = largest
 * magnitude / code range, at most the largest scale, and 0 where that is below the smallest. The
 * numpy forms are in codecs/integers.py and codecs/levels.py. Included by kernels_body.h.
 */

/* Nibbles of one block are unpacked on the stack. */
enum { NIBBLE_BLOCK = 64 };

/* TO_POWERS: codes are those of E3M0's levels; all others are integers. */
enum rounding { NEAREST, STOCHASTIC, SHIFTED, TO_POWERS };

/* The largest scale is one step under the largest float / range, so that what is multiplied with it
 * cannot round to infinity. With the smallest one everything that is decoded is 0 or a normal number.
 * A shift adds 1/2 at most to the largest code, and makes the smallest number 2^-17. */
typedef struct {
    enum rounding rounding;
    size_t bits, block; /* of a code; elements that share a scale */
    float range, scale_min, scale_max;
} form;

static const form INT8 = {NEAREST, 8, 256, 127.0f, FLT_MIN, 0x1.020406p+121f};
static const form INT8_SR = {STOCHASTIC, 8, 256, 127.0f, FLT_MIN, 0x1.020406p+121f};
static const form INT8_SHIFT = {SHIFTED, 8, 256, 127.0f, 0x1p17f * FLT_MIN, 0x1.0100fep+121f};
static const form INT4 = {NEAREST, 4, 64, 7.0f, FLT_MIN, 0x1.249246p+125f};
static const form INT4_SR = {STOCHASTIC, 4, 64, 7.0f, FLT_MIN, 0x1.249246p+125f};
static const form INT4_SHIFT = {SHIFTED, 4, 64, 7.0f, 0x1p17f * FLT_MIN, 0x1.11110ep+125f};
static const form E3M0 = {TO_POWERS, 4, 64, 16.0f, 4 * FLT_MIN, 0x1.fffffcp+123f};

/* ---------------------------------------------------------------- where what lies */

INLINE size_t blocks_of(const form *form, size_t count)
{
    return count / form->block + (count % form->block != 0);
}

INLINE size_t scales_at(const form *form)
{
    return form->rounding == SHIFTED ? KEY_BYTES : 0;
}

INLINE size_t codes_at(const form *form, size_t count)
{
    return scales_at(form) + sizeof(float) * blocks_of(form, count);
}

INLINE size_t block_bytes(const form *form, size_t count)
{
    return codes_at(form, count) + (form->bits == 8 ? count : count / 2 + count % 2);
}

/* What is added to every code of a block in decoding: in (-1/2, 1/2). */
INLINE float shift_of(stream random, size_t block)
{
    float part = (float)(int32_t)(word_of(random, (uint32_t)block) >> 16);
    part = part + 0.5f;
    part = part * 0x1p-16f;
    return part - 0.5f;
}

/* ---------------------------------------------------------------- encoding */

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

/* By magnitude, because compilers vectorize it. */
INLINE float clamp(float value, float limit)
{
    int32_t magnitude = bits_of(value) & MAGNITUDE_BITS, sign = bits_of(value) & ~MAGNITUDE_BITS;
    magnitude = magnitude < bits_of(limit) ? magnitude : bits_of(limit);
    return float_of(magnitude | sign);
}

/* Up with the probability of what is above the next lower integer. */
INLINE int32_t stochastic(float value, uint32_t word)
{
    int32_t nearest = bits_of(value + ROUNDING) - bits_of(ROUNDING);
    int32_t floor = nearest - ((float)nearest > value);
    return floor + (unit_float(word) < value - (float)floor);
}

/* One byte for each element of the block that begins with element `first`. */
INLINE void quantize(const form *form, const float *restrict values, size_t count, float divisor,
                     stream random, size_t first, uint8_t *restrict codes)
{
    const float shift = form->rounding == SHIFTED ? shift_of(random, first / form->block) : 0.0f;
    for (size_t i = 0; i < count; i++) {
        float scaled = values[i] / divisor;
        if (form->rounding == TO_POWERS) {
            int32_t sign = (int32_t)((uint32_t)bits_of(values[i]) >> 31) << 3;
            codes[i] = (uint8_t)(sign | e3m0_index(float_of(bits_of(scaled) & MAGNITUDE_BITS)));
        } else if (form->rounding == STOCHASTIC) {
            uint32_t word = word_of(random, (uint32_t)first + (uint32_t)i);
            codes[i] = (uint8_t)(uint32_t)stochastic(clamp(scaled, form->range), word);
        } else {
            if (form->rounding == SHIFTED)
                scaled = clamp(scaled - shift, form->range);
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

INLINE int encode_block(const form *form, const float *restrict values, size_t count, stream random,
                        size_t first, uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = largest_magnitude_bits(values, count);
    if (top >= INFINITY_BITS)
        return 0;
    float scale = float_of(top) / form->range;
    scale = scale < form->scale_max ? scale : form->scale_max;
    /* Where the scale is 0 the values are so small that they round to 0 when divided by 1. */
    float divisor = scale < form->scale_min ? 1.0f : scale;
    scale = scale < form->scale_min ? 0.0f : scale;
    memcpy(scale_out, &scale, sizeof scale);
    if (form->bits == 8) {
        quantize(form, values, count, divisor, random, first, codes);
    } else {
        uint8_t nibbles[NIBBLE_BLOCK];
        quantize(form, values, count, divisor, random, first, nibbles);
        if (count % 2)
            nibbles[count] = 0; /* a short block: there is room for one more */
        pack_nibbles(nibbles, (count + 1) / 2, codes);
    }
    return 1;
}

INLINE int encode_blocks(const form *form, const float *restrict values, size_t count, uint64_t key,
                         uint8_t *restrict out)
{
    const size_t width = form->block, code_bytes = width * form->bits / 8;
    const stream random = stream_of(key);
    size_t whole = count / width, rest = count % width;
    uint8_t *scales = out + scales_at(form), *codes = out + codes_at(form, count);
    if (form->rounding == SHIFTED)
        memcpy(out, &key, sizeof key);
    for (size_t block = 0; block < whole; block++)
        if (!encode_block(form, values + width * block, width, random, width * block,
                          scales + sizeof(float) * block, codes + code_bytes * block))
            return 0;
    return rest == 0 || encode_block(form, values + width * whole, rest, random, width * whole,
                                     scales + sizeof(float) * whole, codes + code_bytes * whole);
}

/* ---------------------------------------------------------------- checking */

/* A scale is +0 or lies between the smallest and the largest. Bits of positive floats order like
 * integers, and negative ones, -0 among them, are negative integers. */
INLINE int scales_allowed(const form *form, const uint8_t *restrict scales, size_t blocks)
{
    const int32_t lowest = bits_of(form->scale_min), highest = bits_of(form->scale_max);
    int32_t wrong = 0;
    for (size_t block = 0; block < blocks; block++) {
        int32_t bits;
        memcpy(&bits, scales + sizeof bits * block, sizeof bits);
        wrong |= (bits != 0) & ((bits < lowest) | (bits > highest));
    }
    return !wrong;
}

INLINE int codes_allowed(const form *form, const uint8_t *restrict codes, size_t count)
{
    uint8_t wrong = 0;
    if (form->bits == 8) {
        for (size_t i = 0; i < count; i++)
            wrong |= codes[i] == 0x80; /* -128 */
        return !wrong;
    }
    size_t bytes = (count + 1) / 2;
    if (form->rounding != TO_POWERS)
        for (size_t i = 0; i < bytes; i++)
            wrong |= ((codes[i] & 0x0F) == 0x08) | ((codes[i] & 0xF0) == 0x80); /* -8 */
    if (count % 2)
        wrong |= codes[bytes - 1] >> 4 != 0;
    return !wrong;
}

INLINE int check_blocks(const form *form, const uint8_t *restrict data, size_t count)
{
    return scales_allowed(form, data + scales_at(form), blocks_of(form, count)) &&
           codes_allowed(form, data + codes_at(form, count), count);
}

/* ---------------------------------------------------------------- decoding */

/* A byte for each element: int4 with its sign, fp4_e3m0 as it is. */
INLINE void unpack_nibbles(const form *form, const uint8_t *restrict codes, size_t bytes,
                           uint8_t *restrict nibbles)
{
    for (size_t i = 0; i < bytes; i++) {
        uint16_t pair = (uint16_t)((codes[i] & 0x0F) | (codes[i] & 0xF0) << 4);
        memcpy(nibbles + 2 * i, &pair, sizeof pair);
    }
    if (form->rounding != TO_POWERS)
        for (size_t i = 0; i < 2 * bytes; i++)
            nibbles[i] = (uint8_t)((nibbles[i] ^ 8) - 8);
}

INLINE float level_of(const form *form, uint8_t code, float shift)
{
    if (form->rounding == SHIFTED)
        return (float)(int8_t)code + shift;
    if (form->rounding != TO_POWERS)
        return (float)(int8_t)code;
    int32_t index = code & 7;
    int32_t bits = index ? (index + 124) << 23 : 0;
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(code & 8) << 28));
}

INLINE void decode_block(const form *form, int add, float scale, float shift,
                         const uint8_t *restrict codes, size_t count, float factor,
                         float *restrict out)
{
    uint8_t nibbles[NIBBLE_BLOCK];
    if (form->bits != 8) {
        unpack_nibbles(form, codes, (count + 1) / 2, nibbles);
        codes = nibbles;
    }
    for (size_t i = 0; i < count; i++) {
        float value = level_of(form, codes[i], shift) * scale;
        if (add) {
            value = value * factor;
            out[i] = out[i] + value;
        } else {
            out[i] = value;
        }
    }
}

/* The `count` elements from `lo`, the first of a block, to the end of one, of `total`. */
INLINE void decode_blocks(const form *form, int add, const uint8_t *restrict data, size_t total,
                          size_t lo, size_t count, float factor, float *restrict out)
{
    const size_t width = form->block, code_bytes = width * form->bits / 8, first = lo / width;
    const uint8_t *scales = data + scales_at(form), *codes = data + codes_at(form, total);
    stream random = {0, 0};
    size_t whole = count / width, rest = count % width;
    if (form->rounding == SHIFTED) {
        uint64_t key;
        memcpy(&key, data, sizeof key);
        random = stream_of(key);
    }
    scales += sizeof(float) * first;
    codes += code_bytes * first;
    for (size_t block = 0; block < whole; block++)
        decode_block(form, add, float_at(scales, block), shift_of(random, first + block),
                     codes + code_bytes * block, width, factor, out + width * block);
    if (rest)
        decode_block(form, add, float_at(scales, whole), shift_of(random, first + whole),
                     codes + code_bytes * whole, rest, factor, out + width * whole);
}

/* ---------------------------------------------------------------- by name */

#define ENCODE_BLOCKS(NAME, FORM)                                                             \
    static int encode_##NAME(const float *values, size_t count, uint64_t key, uint8_t *out)   \
    {                                                                                         \
        return encode_blocks(&FORM, values, count, key, out);                                 \
    }

#define BLOCK_FUNCTIONS(NAME, FORM)                                                           \
    ENCODE_BLOCKS(NAME, FORM)                                                                 \
    static size_t bytes_##NAME(size_t count)                                                  \
    {                                                                                         \
        return block_bytes(&FORM, count);                                                     \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_blocks(&FORM, data, count);                                              \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t total, size_t lo, size_t count,     \
                              float *out)                                                     \
    {                                                                                         \
        decode_blocks(&FORM, 0, data, total, lo, count, 0.0f, out);                           \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_blocks(&FORM, 1, data, count, 0, count, factor, into);                         \
    }

/* What was rounded at random is decoded like what was rounded to the nearest. */
BLOCK_FUNCTIONS(int8, INT8)
ENCODE_BLOCKS(int8_sr, INT8_SR)
BLOCK_FUNCTIONS(int8_shift, INT8_SHIFT)
BLOCK_FUNCTIONS(int4, INT4)
ENCODE_BLOCKS(int4_sr, INT4_SR)
BLOCK_FUNCTIONS(int4_shift, INT4_SHIFT)
BLOCK_FUNCTIONS(fp4_e3m0, E3M0)
