/* Vectors of the instruction set, for sums that have to stay in registers. Included by kernels_body.h.
 *
 * Loops over arrays are vectorized by compilers; but an array of sums, to which an outer loop adds,
 * they keep in memory. Where there are no such types a vector has one element.
 */
#if defined(__GNUC__) || defined(__clang__)
typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef float floats;
typedef double doubles;
typedef uint32_t words;
#endif
enum { FLOATS = sizeof(floats) / sizeof(float), DOUBLES = sizeof(doubles) / sizeof(double) };

INLINE floats floats_at(const float *values)
{
    floats all;
    memcpy(&all, values, sizeof all);
    return all;
}

/* As many floats, converted. gcc takes the way through memory, where an instruction would do it. */
INLINE doubles doubles_at(const float *values)
{
#if defined(DOUBLES_AT)
    return DOUBLES_AT(values);
#else
    double wide[DOUBLES];
    doubles all;
    for (size_t i = 0; i < DOUBLES; i++)
        wide[i] = (double)values[i];
    memcpy(&all, wide, sizeof all);
    return all;
#endif
}
