/* Robust rules on the rows of several peers. Included by kernels_body.h.
 *
 * Rows lie one after the other, `count` elements each. Columns are taken LANES at a time, all rows of
 * them in a buffer that stays near the processor.
 */

enum { LANES = 64, LANE_VECTORS = LANES / FLOATS };

/* ---------------------------------------------------------------- mixing */

/* LANES values, or `width` of them and zeros. */
INLINE void take_lanes(const float *restrict row, size_t width, float *restrict lanes)
{
    if (width == LANES) {
        memcpy(lanes, row, sizeof *lanes * LANES);
    } else {
        memset(lanes, 0, sizeof *lanes * LANES);
        memcpy(lanes, row, sizeof *lanes * width);
    }
}

/* `width` columns from `lo` on, one row after the other. As they lie, rows that are a power of two apart
 * take each other's places in the cache, from the ninth or thirteenth on, and may lie across its lines. */
INLINE void take_columns(const float *restrict rows, size_t n, size_t count, size_t lo, size_t width,
                         float (*restrict columns)[LANES])
{
    for (size_t j = 0; j < n; j++)
        take_lanes(rows + j * count + lo, width, columns[j]);
}

/* sums[l] = sum of factors[j] * columns[j][l], each product and sum rounded, in the order of j; a factor
 * of zero is left out. */
INLINE void mix_columns(const float (*restrict columns)[LANES], size_t n,
                        const float *restrict factors, float *restrict sums)
{
    floats kept[LANE_VECTORS] = {{0}};
    for (size_t j = 0; j < n; j++)
        if (factors[j] != 0.0f)
            for (size_t v = 0; v < LANE_VECTORS; v++)
                kept[v] = kept[v] + floats_at(columns[j] + FLOATS * v) * factors[j];
    for (size_t v = 0; v < LANE_VECTORS; v++)
        memcpy(sums + FLOATS * v, &kept[v], sizeof kept[v]);
}

/* out[i] = sum of coefficients[i][j] * rows[j]. */
static void mix_rows(const float *restrict rows, size_t n, size_t count,
                     const float *restrict coefficients, size_t k, float *restrict out)
{
    float columns[ROWS_MAX][LANES], sums[LANES];
    for (size_t lo = 0; lo < count; lo += LANES) {
        size_t width = count - lo < LANES ? count - lo : LANES;
        take_columns(rows, n, count, lo, width, columns);
        for (size_t i = 0; i < k; i++) {
            mix_columns((const float(*)[LANES])columns, n, coefficients + i * n, sums);
            memcpy(out + i * count + lo, sums, sizeof *sums * width);
        }
    }
}

/* ---------------------------------------------------------------- ordering */

/* The bits of a float as an integer that is ordered like it, and back: compilers have vector
 * instructions for the smaller of two integers, but for floats only where NaN and the sign of zero do
 * not matter. */
INLINE int32_t ordered_bits(int32_t bits)
{
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

/* `width` columns from `lo` on, as they are or, with coefficients, mixed to k rows. */
INLINE void load_columns(const float *restrict rows, size_t n, size_t count, size_t lo,
                         size_t width, const float *restrict coefficients, size_t k,
                         int32_t (*restrict sorted)[LANES])
{
    float columns[ROWS_MAX][LANES], values[LANES];
    if (coefficients != NULL)
        take_columns(rows, n, count, lo, width, columns);
    for (size_t i = 0; i < k; i++) {
        if (coefficients != NULL)
            mix_columns((const float(*)[LANES])columns, n, coefficients + i * n, values);
        else
            take_lanes(rows + i * count + lo, width, values);
        for (size_t l = 0; l < LANES; l++)
            sorted[i][l] = ordered_bits(bits_of(values[l]));
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

INLINE float value_of(int32_t ordered)
{
    return float_of(ordered_bits(ordered));
}

/* Moves the `keep` values of each sorted column that are closest to its median up to its start. Of
 * two that are as far away the smaller one is among them. */
INLINE void move_windows(int32_t (*restrict sorted)[LANES], size_t n, size_t keep)
{
    float middle[LANES];
    int32_t first[LANES] = {0}, moving[LANES];
    for (size_t l = 0; l < LANES; l++) {
        middle[l] = value_of(sorted[n / 2][l]);
        if (n % 2 == 0)
            middle[l] = (value_of(sorted[n / 2 - 1][l]) + middle[l]) / 2.0f;
        moving[l] = 1;
    }
    for (size_t j = 0; j + keep < n; j++)
        for (size_t l = 0; l < LANES; l++) {
            float below = middle[l] - value_of(sorted[j][l]);
            float above = value_of(sorted[j + keep][l]) - middle[l];
            moving[l] &= below > above;
            first[l] += moving[l];
        }
    for (size_t step = 1; step + keep <= n; step *= 2) /* by the bits of `first` */
        for (size_t j = 0; j + step < n; j++)
            for (size_t l = 0; l < LANES; l++)
                sorted[j][l] = first[l] & (int32_t)step ? sorted[j + step][l] : sorted[j][l];
}

/* Each column, mixed before or not, sorted by a network (pairs of its k values: the smaller to the
 * first), then the mean of `keep` values from the `first` on, or, `around` the median, of those that
 * are closest to it. */
static void order_rows(const float *restrict rows, size_t n, size_t count,
                       const float *restrict coefficients, size_t k,
                       const uint8_t *restrict network, size_t pairs, size_t first, size_t keep,
                       int around, float *restrict out)
{
    int32_t sorted[ROWS_MAX][LANES];
    float divisor = (float)keep;
    for (size_t lo = 0; lo < count; lo += LANES) {
        size_t width = count - lo < LANES ? count - lo : LANES;
        float sums[LANES];
        load_columns(rows, n, count, lo, width, coefficients, k, sorted);
        sort_columns(network, pairs, sorted);
        if (around)
            move_windows(sorted, k, keep);
        for (size_t l = 0; l < LANES; l++)
            sums[l] = value_of(sorted[first][l]);
        for (size_t j = 1; j < keep; j++)
            for (size_t l = 0; l < LANES; l++)
                sums[l] = sums[l] + value_of(sorted[first + j][l]);
        for (size_t l = 0; l < LANES; l++)
            sums[l] = sums[l] / divisor;
        memcpy(out + lo, sums, sizeof *sums * width);
    }
}
