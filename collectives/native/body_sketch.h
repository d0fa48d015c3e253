/* Sums in buckets, for audits. Included by kernels_body.h.
 *
 * Bucket b adds up what stands at k = b mod BUCKETS, in float64 and in ascending k: one chain of
 * additions for each, all of them side by side, so that no order is left to the compiler.
 */

/* The values, each with its sign turned where its bit is 1; the bit of element k is bit k mod 8 of
 * byte k / 8. */
static void sketch(const float *restrict values, size_t count, const uint8_t *restrict bits,
                   double *restrict out)
{
    double sums[BUCKETS] = {0};
    size_t whole = count - count % BUCKETS;
    for (size_t i = 0; i < whole; i += BUCKETS) {
        uint32_t turned = bits[i / BUCKETS];
        float block[BUCKETS];
        for (int b = 0; b < BUCKETS; b++) {
            uint32_t word;
            memcpy(&word, values + i + b, sizeof word);
            word ^= (turned << (31 - b)) & 0x80000000u;
            memcpy(block + b, &word, sizeof word);
        }
        for (int b = 0; b < BUCKETS; b++)
            sums[b] = sums[b] + (double)block[b];
    }
    for (size_t b = 0; whole + b < count; b++) {
        double value = values[whole + b];
        sums[b] = sums[b] + ((bits[whole / BUCKETS] >> b & 1) ? -value : value);
    }
    memcpy(out, sums, sizeof sums);
}

/* The squares of the differences; difference, square and sum are rounded, each by itself. */
static void squares(const float *restrict values, const float *restrict other, size_t count,
                    double *restrict out)
{
    double sums[BUCKETS] = {0};
    size_t whole = count - count % BUCKETS;
    for (size_t i = 0; i < whole; i += BUCKETS)
        for (int b = 0; b < BUCKETS; b++) {
            double away = (double)values[i + b] - (double)other[i + b];
            double square = away * away;
            sums[b] = sums[b] + square;
        }
    for (size_t b = 0; whole + b < count; b++) {
        double away = (double)values[whole + b] - (double)other[whole + b];
        double square = away * away;
        sums[b] = sums[b] + square;
    }
    memcpy(out, sums, sizeof sums);
}
