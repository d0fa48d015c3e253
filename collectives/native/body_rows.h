/* Robust rules on the rows of several peers. Included by kernels_body.h.
 *
 * Rows lie one after the other, `count` elements each. Columns are taken LANES at a time, all rows of
 * them in a buffer that stays near the processor.
 */

enum { LANES = 64 };

/* out[i] = sum of coefficients[i][j] * rows[j], each product and sum rounded, in the order of j;
 * a coefficient of zero is left out. */
static void mix_rows(const float *restrict rows, size_t n, size_t count,
                     const float *restrict coefficients, size_t k, float *restrict out)
{
    for (size_t lo = 0; lo < count; lo += LANES) {
        size_t width = count - lo < LANES ? count - lo : LANES;
        for (size_t i = 0; i < k; i++) {
            float sums[LANES] = {0};
            for (size_t j = 0; j < n; j++) {
                float factor = coefficients[i * n + j];
                const float *row = rows + j * count + lo;
                if (factor == 0.0f)
                    continue;
                if (width == LANES)
                    for (size_t l = 0; l < LANES; l++)
                        sums[l] = sums[l] + row[l] * factor;
                else
                    for (size_t l = 0; l < width; l++)
                        sums[l] = sums[l] + row[l] * factor;
            }
            memcpy(out + i * count + lo, sums, width * sizeof(float));
        }
    }
}

/* The bits of a float as an integer that is ordered like it, and back: compilers have vector
 * instructions for the smaller of two integers, but for floats only where NaN and the sign of zero do
 * not matter. */
INLINE int32_t ordered_bits(int32_t bits)
{
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

INLINE float value_at(const int32_t (*sorted)[LANES], size_t row, size_t lane)
{
    int32_t bits = ordered_bits(sorted[row][lane]);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void load_columns(const float *restrict rows, size_t n, size_t count, size_t lo,
                         size_t width, int32_t (*restrict sorted)[LANES])
{
    for (size_t j = 0; j < n; j++) {
        if (width < LANES)
            memset(sorted[j], 0, sizeof sorted[j]);
        memcpy(sorted[j], rows + j * count + lo, width * sizeof(float));
        for (size_t l = 0; l < LANES; l++)
            sorted[j][l] = ordered_bits(sorted[j][l]);
    }
}

INLINE void sort_columns(const uint8_t *restrict network, size_t pairs, int32_t (*sorted)[LANES])
{
    for (size_t p = 0; p < pairs; p++) {
        int32_t *low = sorted[network[2 * p]], *high = sorted[network[2 * p + 1]];
        INDEPENDENT
        for (size_t l = 0; l < LANES; l++) {
            int32_t a = low[l], b = high[l];
            low[l] = a < b ? a : b;
            high[l] = a < b ? b : a;
        }
    }
}

/* Where the window of `keep` values of a sorted column that are closest to its median begins. Of two
 * that are as far away the smaller one is in it. */
INLINE size_t window_of(const int32_t (*sorted)[LANES], size_t lane, size_t n, size_t keep)
{
    float middle = value_at(sorted, n / 2, lane);
    size_t first = 0;
    if (n % 2 == 0)
        middle = (value_at(sorted, n / 2 - 1, lane) + middle) / 2.0f;
    while (first + keep < n && middle - value_at(sorted, first, lane) >
                                   value_at(sorted, first + keep, lane) - middle)
        first++;
    return first;
}

/* Each column sorted by a network (pairs of rows: the smaller value to the first), then the mean of
 * `keep` values from the `first` on, or, `around` the median, of those that are closest to it. */
static void order_rows(const float *restrict rows, size_t n, size_t count,
                       const uint8_t *restrict network, size_t pairs, size_t first, size_t keep,
                       int around, float *restrict out)
{
    int32_t sorted[ROWS_MAX][LANES];
    const int32_t(*const done)[LANES] = (const int32_t(*)[LANES])sorted;
    float divisor = (float)keep, sums[LANES];
    for (size_t lo = 0; lo < count; lo += LANES) {
        size_t width = count - lo < LANES ? count - lo : LANES;
        load_columns(rows, n, count, lo, width, sorted);
        sort_columns(network, pairs, sorted);
        if (around)
            for (size_t l = 0; l < width; l++) {
                size_t start = window_of(done, l, n, keep);
                sums[l] = value_at(done, start, l);
                for (size_t j = 1; j < keep; j++)
                    sums[l] = sums[l] + value_at(done, start + j, l);
            }
        else
            for (size_t j = 0; j < keep; j++)
                for (size_t l = 0; l < LANES; l++) {
                    float value = value_at(done, first + j, l);
                    sums[l] = j ? sums[l] + value : value;
                }
        for (size_t l = 0; l < width; l++)
            out[lo + l] = sums[l] / divisor;
    }
}
