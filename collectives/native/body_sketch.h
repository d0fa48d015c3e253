/* What audits ask of a vector: sums in buckets, the largest values. Included by kernels_body.h.
 *
 * Bucket b adds up what stands at k = b mod BUCKETS, in float64 and in ascending k: one chain of
 * additions for each, all of them side by side, so that no order is left to the compiler.
 */

/* A value, negated where the bit b of a byte is 1. */
INLINE float turned(float value, uint32_t byte, size_t b)
{
    uint32_t sign = (byte << (31 - b)) & 0x80000000u;
    return float_of((int32_t)((uint32_t)bits_of(value) ^ sign));
}

enum { SKETCHED = 64 * BUCKETS }; /* elements whose signs are turned before they are added */

/* FLOATS of the bits, from `at` on, each as the sign of a word. */
INLINE words signs_at(const uint8_t *bits, size_t at)
{
    uint32_t lanes[FLOATS], group = bits[at / 8];
    words lane;
    if (FLOATS > 8)
        group |= (uint32_t)bits[at / 8 + 1] << 8;
    group >>= at % 8;
    for (size_t i = 0; i < FLOATS; i++)
        lanes[i] = (uint32_t)1 << i;
    memcpy(&lane, lanes, sizeof lane);
    return (words)((group & lane) == lane) << 31;
}

/* The values, each with its sign turned where its bit is 1; the bit of element k is bit k mod 8 of
 * byte k / 8. */
static void sketch(const float *restrict values, size_t count, const uint8_t *restrict bits,
                   double *restrict out)
{
    doubles sums[BUCKETS / DOUBLES] = {{0}};
    size_t whole = count - count % BUCKETS;
    for (size_t lo = 0; lo < whole; lo += SKETCHED) {
        float block[SKETCHED];
        size_t width = whole - lo < SKETCHED ? whole - lo : SKETCHED, i = 0;
        for (; i + FLOATS <= width; i += FLOATS) {
            words all;
            memcpy(&all, values + lo + i, sizeof all);
            all ^= signs_at(bits, lo + i);
            memcpy(block + i, &all, sizeof all);
        }
        for (; i < width; i++)
            block[i] = turned(values[lo + i], bits[(lo + i) / BUCKETS], i % BUCKETS);
        for (i = 0; i < width; i += BUCKETS)
            for (size_t v = 0; v < BUCKETS / DOUBLES; v++)
                sums[v] = sums[v] + doubles_at(block + i + DOUBLES * v);
    }
    memcpy(out, sums, sizeof sums);
    for (size_t b = 0; whole + b < count; b++)
        out[b] = out[b] + (double)turned(values[whole + b], bits[whole / BUCKETS], b);
}

/* The squares of the differences; difference, square and sum are rounded, each by itself. */
static void squares(const float *restrict values, const float *restrict other, size_t count,
                    double *restrict out)
{
    doubles sums[BUCKETS / DOUBLES] = {{0}};
    size_t whole = count - count % BUCKETS;
    for (size_t i = 0; i < whole; i += BUCKETS)
        for (size_t v = 0; v < BUCKETS / DOUBLES; v++) {
            size_t at = i + DOUBLES * v;
            doubles away = doubles_at(values + at) - doubles_at(other + at);
            doubles square = away * away;
            sums[v] = sums[v] + square;
        }
    memcpy(out, sums, sizeof sums);
    for (size_t b = 0; whole + b < count; b++) {
        double away = (double)values[whole + b] - (double)other[whole + b];
        double square = away * away;
        out[b] = out[b] + square;
    }
}

/* The largest magnitude of each block; the last may be shorter. */
static void peaks(const float *restrict values, size_t count, size_t block, float *restrict out)
{
    for (size_t lo = 0; lo < count; lo += block) {
        size_t width = count - lo < block ? count - lo : block;
        out[lo / block] = float_of(largest_magnitude_bits(values + lo, width));
    }
}
