/* int2 and sign: codes of two bits and of one, and a float32 scale for each block of 256. The numpy
 * forms are in codecs/levels.py and codecs/signs.py. Included by kernels_body.h.
 *
 * All scales come first, then all codes, the first in the low bits of a byte. A code's highest bit is
 * the sign; the lower one of int2 chooses the larger of its two levels. Sums are of doubles, in the
 * order of codecs/scales.py's fold. */

enum { FEW_BLOCK = 256 };

typedef struct {
    size_t bits; /* of a code */
    float scale_min, scale_max;
} few_bits;

static const few_bits INT2 = {2, 4 * FLT_MIN, 0x1.52fba6p+127f};
static const few_bits SIGN = {1, FLT_MIN, FLT_MAX};

/* int2's levels, of a Gaussian with a standard deviation of 1, and where a magnitude takes the larger. */
#define INT2_LOW 0x1.cfaacep-2f
#define INT2_HIGH 0x1.82a994p+0f
#define INT2_MIDDLE 0x1.f69446p-1f

INLINE size_t few_blocks(size_t count)
{
    return count / FEW_BLOCK + (count % FEW_BLOCK != 0);
}

INLINE size_t few_bytes(const few_bits *form, size_t count)
{
    return sizeof(float) * few_blocks(count) + (count * form->bits + 7) / 8;
}

/* ---------------------------------------------------------------- encoding */

/* The upper half is added to the lower half until one number is left. */
INLINE double folded(double *restrict values, size_t width)
{
    while (width > 1) {
        size_t half = 1;
        while (2 * half < width)
            half *= 2;
        for (size_t i = 0; i < width - half; i++)
            values[i] = values[i] + values[half + i];
        width = half;
    }
    return values[0];
}

/* A scale within its limits; where it is below them, 0. */
INLINE void write_scale(const few_bits *form, float scale, uint8_t *restrict out)
{
    scale = scale < form->scale_max ? scale : form->scale_max;
    scale = scale < form->scale_min ? 0.0f : scale;
    memcpy(out, &scale, sizeof scale);
}

/* A byte for each element. The levels are chosen by the root mean square, then the scale that is best
 * for them: <x, q> / <q, q>. */
INLINE float choose_int2(const float *restrict values, size_t count, uint8_t *restrict codes)
{
    double products[FEW_BLOCK], squares[FEW_BLOCK];
    for (size_t i = 0; i < count; i++)
        products[i] = (double)values[i] * (double)values[i];
    float divisor = (float)sqrt(folded(products, count) / (double)count);
    divisor = divisor < INT2.scale_min ? 1.0f : divisor;
    for (size_t i = 0; i < count; i++) {
        int32_t scaled = bits_of(values[i] / divisor);
        int32_t larger = (scaled & MAGNITUDE_BITS) > bits_of(INT2_MIDDLE);
        codes[i] = (uint8_t)(larger | (int32_t)((uint32_t)scaled >> 31) << 1);
    }
    for (size_t i = 0; i < count; i++) {
        double level = codes[i] & 1 ? (double)INT2_HIGH : (double)INT2_LOW;
        double magnitude = (double)float_of(bits_of(values[i]) & MAGNITUDE_BITS);
        products[i] = magnitude * level;
        squares[i] = level * level;
    }
    double best = folded(products, count) / folded(squares, count);
    return best < (double)INT2.scale_max ? (float)best : INT2.scale_max;
}

/* A byte for each element; the scale is the mean magnitude. */
INLINE float choose_sign(const float *restrict values, size_t count, uint8_t *restrict codes)
{
    double magnitudes[FEW_BLOCK];
    for (size_t i = 0; i < count; i++) {
        magnitudes[i] = (double)float_of(bits_of(values[i]) & MAGNITUDE_BITS);
        codes[i] = (uint8_t)((uint32_t)bits_of(values[i]) >> 31);
    }
    return (float)(folded(magnitudes, count) / (double)count);
}

/* What is in a byte of the output lies in eight bytes of `codes`, or in four. */
INLINE void pack_few(const few_bits *form, const uint8_t *restrict codes, size_t bytes,
                     uint8_t *restrict out)
{
    for (size_t i = 0; i < bytes; i++) {
        if (form->bits == 2) {
            uint32_t word;
            memcpy(&word, codes + sizeof word * i, sizeof word);
            word |= word >> 6;
            out[i] = (uint8_t)(word | word >> 12);
        } else {
            uint64_t word;
            memcpy(&word, codes + sizeof word * i, sizeof word);
            word |= word >> 7;
            word |= word >> 14;
            out[i] = (uint8_t)(word | word >> 28);
        }
    }
}

INLINE int encode_few_block(const few_bits *form, const float *restrict values, size_t count,
                            uint8_t *restrict scale_out, uint8_t *restrict packed)
{
    uint8_t codes[FEW_BLOCK] = {0};
    if (largest_magnitude_bits(values, count) >= INFINITY_BITS)
        return 0;
    write_scale(form, form->bits == 2 ? choose_int2(values, count, codes)
                                      : choose_sign(values, count, codes), scale_out);
    pack_few(form, codes, (count * form->bits + 7) / 8, packed);
    return 1;
}

INLINE int encode_few(const few_bits *form, const float *restrict values, size_t count,
                      uint8_t *restrict out)
{
    uint8_t *packed = out + sizeof(float) * few_blocks(count);
    size_t whole = count / FEW_BLOCK, rest = count % FEW_BLOCK, bytes = FEW_BLOCK * form->bits / 8;
    for (size_t block = 0; block < whole; block++)
        if (!encode_few_block(form, values + FEW_BLOCK * block, FEW_BLOCK,
                              out + sizeof(float) * block, packed + bytes * block))
            return 0;
    return rest == 0 || encode_few_block(form, values + FEW_BLOCK * whole, rest,
                                         out + sizeof(float) * whole, packed + bytes * whole);
}

/* ---------------------------------------------------------------- checking, decoding */

/* Every code is one that encode writes. A scale is +0 or within its limits, and what is left of the
 * last byte is 0. */
INLINE int check_few(const few_bits *form, const uint8_t *restrict data, size_t count)
{
    const int32_t lowest = bits_of(form->scale_min), highest = bits_of(form->scale_max);
    int32_t wrong = 0;
    for (size_t block = 0; block < few_blocks(count); block++) {
        int32_t bits = bits_of(float_at(data, block));
        wrong |= (bits != 0) & ((bits < lowest) | (bits > highest));
    }
    size_t used = count * form->bits % 8;
    if (used)
        wrong |= data[few_bytes(form, count) - 1] >> used;
    return !wrong;
}

INLINE float few_level(const few_bits *form, int32_t code)
{
    int32_t bits = bits_of(1.0f);
    if (form->bits == 2)
        bits = bits_of(INT2_LOW) + (code & 1) * (bits_of(INT2_HIGH) - bits_of(INT2_LOW));
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(code >> (form->bits - 1)) << 31));
}

/* The inverse of pack_few. */
INLINE void unpack_few(const few_bits *form, const uint8_t *restrict packed, size_t bytes,
                       uint8_t *restrict codes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (form->bits == 2) {
            uint32_t word = packed[i];
            word = (word | word << 12) & 0x000F000F;
            word = (word | word << 6) & 0x03030303;
            memcpy(codes + sizeof word * i, &word, sizeof word);
        } else {
            uint64_t word = packed[i];
            word = (word | word << 28) & 0x0000000F0000000F;
            word = (word | word << 14) & 0x0003000300030003;
            word = (word | word << 7) & 0x0101010101010101;
            memcpy(codes + sizeof word * i, &word, sizeof word);
        }
    }
}

INLINE void decode_few_block(const few_bits *form, int add, float scale,
                             const uint8_t *restrict packed, size_t count, float factor,
                             float *restrict out)
{
    uint8_t codes[FEW_BLOCK];
    unpack_few(form, packed, (count * form->bits + 7) / 8, codes);
    for (size_t i = 0; i < count; i++) {
        float value = few_level(form, codes[i]) * scale;
        if (add) {
            value = value * factor;
            out[i] = out[i] + value;
        } else {
            out[i] = value;
        }
    }
}

INLINE void decode_few(const few_bits *form, int add, const uint8_t *restrict data, size_t total,
                       size_t lo, size_t count, float factor, float *restrict out)
{
    const uint8_t *packed = data + sizeof(float) * few_blocks(total) + lo * form->bits / 8;
    size_t whole = count / FEW_BLOCK, rest = count % FEW_BLOCK, bytes = FEW_BLOCK * form->bits / 8;
    for (size_t block = 0; block < whole; block++)
        decode_few_block(form, add, float_at(data, lo / FEW_BLOCK + block), packed + bytes * block,
                         FEW_BLOCK, factor, out + FEW_BLOCK * block);
    if (rest)
        decode_few_block(form, add, float_at(data, lo / FEW_BLOCK + whole), packed + bytes * whole,
                         rest, factor, out + FEW_BLOCK * whole);
}

#define FEW_FUNCTIONS(NAME, FORM)                                                             \
    static size_t bytes_##NAME(size_t count)                                                  \
    {                                                                                         \
        return few_bytes(&FORM, count);                                                       \
    }                                                                                         \
    static int encode_##NAME(const float *values, size_t count, uint64_t key, uint8_t *out)   \
    {                                                                                         \
        (void)key;                                                                            \
        return encode_few(&FORM, values, count, out);                                         \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_few(&FORM, data, count);                                                 \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t total, size_t lo, size_t count,     \
                              float *out)                                                     \
    {                                                                                         \
        decode_few(&FORM, 0, data, total, lo, count, 0.0f, out);                              \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_few(&FORM, 1, data, count, 0, count, factor, into);                            \
    }

FEW_FUNCTIONS(int2, INT2)
FEW_FUNCTIONS(sign, SIGN)
