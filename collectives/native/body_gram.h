/* Inner products of the rows of several peers. Included by kernels_body.h.
 *
 * Of each pair of rows, bucket b adds up the products at k = b mod BUCKETS, in ascending k; in the end
 * the buckets are added up in their order. A product of two floats is exact in float64, so nothing is
 * rounded but these sums, and all instruction sets give the same bits.
 */

/* Rows that are multiplied with as many others at a time: their sums fit into the registers. */
enum { GRAM_ROWS = VECTOR_BYTES == 64 ? 4 : 2, BUCKET_VECTORS = BUCKETS / DOUBLES };

typedef doubles bucket_sums[GRAM_ROWS][GRAM_ROWS][BUCKET_VECTORS];

/* The products of rows that lie at these places; `whole` is a multiple of BUCKETS. */
INLINE void multiply(const float *const *a, const float *const *b, size_t whole, bucket_sums *out)
{
    bucket_sums sums = {{{{0}}}};
    for (size_t k = 0; k < whole; k += BUCKETS)
        for (size_t v = 0; v < BUCKET_VECTORS; v++) {
            doubles right[GRAM_ROWS];
            for (size_t j = 0; j < GRAM_ROWS; j++)
                right[j] = doubles_at(b[j] + k + DOUBLES * v);
            for (size_t i = 0; i < GRAM_ROWS; i++) {
                doubles left = doubles_at(a[i] + k + DOUBLES * v);
                for (size_t j = 0; j < GRAM_ROWS; j++)
                    sums[i][j][v] = sums[i][j][v] + left * right[j];
            }
        }
    for (size_t i = 0; i < GRAM_ROWS; i++)
        for (size_t j = 0; j < GRAM_ROWS; j++)
            for (size_t v = 0; v < BUCKET_VECTORS; v++)
                (*out)[i][j][v] = sums[i][j][v];
}

INLINE double bucket_total(const doubles *sums, const float *a, const float *b, size_t count)
{
    double buckets[BUCKETS], total = 0.0;
    memcpy(buckets, sums, sizeof buckets);
    for (size_t k = count - count % BUCKETS; k < count; k++) {
        double product = (double)a[k] * (double)b[k];
        buckets[k % BUCKETS] = buckets[k % BUCKETS] + product;
    }
    for (size_t i = 0; i < BUCKETS; i++)
        total = total + buckets[i];
    return total;
}

/* total[i][j] += rows[i] . rows[j] */
static void gram(const float *rows, size_t n, size_t count, double *total)
{
    bucket_sums sums;
    for (size_t i = 0; i < n; i += GRAM_ROWS)
        for (size_t j = i; j < n; j += GRAM_ROWS) {
            const float *a[GRAM_ROWS], *b[GRAM_ROWS];
            for (size_t r = 0; r < GRAM_ROWS; r++) { /* beyond the last row: that one again */
                a[r] = rows + count * (i + r < n ? i + r : n - 1);
                b[r] = rows + count * (j + r < n ? j + r : n - 1);
            }
            multiply(a, b, count - count % BUCKETS, &sums);
            for (size_t p = i; p < n && p < i + GRAM_ROWS; p++)
                for (size_t q = j > p ? j : p; q < n && q < j + GRAM_ROWS; q++) {
                    double found = bucket_total(sums[p - i][q - j], rows + count * p,
                                                rows + count * q, count);
                    total[p * n + q] = total[p * n + q] + found;
                    if (p != q)
                        total[q * n + p] = total[q * n + p] + found;
                }
        }
}
