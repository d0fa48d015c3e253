/* Floats and their bits. Included by kernels_body.h. */

#define MAGNITUDE_BITS 0x7FFFFFFF
#define INFINITY_BITS 0x7F800000

/* Added to a float below 2^22 it leaves the nearest integer, ties to even, in the low bits: between
 * 2^23 and 2^24 floats are one apart. It is rint and the conversion in one addition. */
#define ROUNDING 12582912.0f

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

/* Of encoded bytes, which may have any alignment. */
INLINE float float_at(const uint8_t *data, size_t index)
{
    float value;
    memcpy(&value, data + sizeof value * index, sizeof value);
    return value;
}

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
