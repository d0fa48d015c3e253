/* float32 as a codec, and the outer steps. Included by kernels_body.h. */

/* ---------------------------------------------------------------- float32 */

static size_t bytes_float32(size_t count)
{
    return sizeof(float) * count;
}

static int encode_float32(const float *restrict values, size_t count, uint64_t key,
                          uint8_t *restrict out)
{
    (void)key;
    int32_t top = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(values[i]);
        memcpy(out + sizeof bits * i, &bits, sizeof bits);
        bits &= MAGNITUDE_BITS;
        top = bits > top ? bits : top;
    }
    return top < INFINITY_BITS;
}

static int check_float32(const uint8_t *restrict data, size_t count)
{
    int32_t top = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(float_at(data, i)) & MAGNITUDE_BITS;
        top = bits > top ? bits : top;
    }
    return top < INFINITY_BITS;
}

static void decode_float32(const uint8_t *restrict data, size_t total, size_t lo, size_t count,
                           float *restrict out)
{
    (void)total;
    if (count)
        memcpy(out, data + sizeof(float) * lo, sizeof(float) * count);
}

static void decode_add_float32(const uint8_t *restrict data, size_t count, float factor,
                               float *restrict into)
{
    for (size_t i = 0; i < count; i++) {
        float value = float_at(data, i) * factor;
        into[i] = into[i] + value;
    }
}

/* One pass for what `check`, `decode_add` and a check of the sum take four for. Adding to 0.0 makes
 * -0.0 to 0.0, as decode_add on zeros does. */
INLINE int weigh_float32(const uint8_t *restrict data, size_t count, float factor,
                         float *restrict into, int first)
{
    int32_t top = 0;
    for (size_t i = 0; i < count; i++) {
        float value = float_at(data, i);
        int32_t bits = bits_of(value) & MAGNITUDE_BITS;
        value = value * factor;
        value = (first ? 0.0f : into[i]) + value;
        into[i] = value;
        top = bits > top ? bits : top;
        bits = bits_of(value) & MAGNITUDE_BITS;
        top = bits > top ? bits : top;
    }
    return top < INFINITY_BITS;
}

static int weigh(const uint8_t *data, size_t count, float factor, float *into, int first)
{
    return first ? weigh_float32(data, count, factor, into, 1)
                 : weigh_float32(data, count, factor, into, 0);
}

/* ---------------------------------------------------------------- outer steps */

/* nesterov:   b' = mu b + delta;  theta' = theta - lr (delta + mu b')
 * heavy_ball: b' = mu b + delta;  theta' = theta - lr b'
 * sgd:        b' = b;             theta' = theta - lr delta
 *
 * One rounding for each operation, in the order of optim/outer_step.py. Each element is read before it
 * is written, so inputs may be the outputs. */
#define OUTER_STEPS(TYPE, WIDTH)                                                               \
    static void nesterov_##WIDTH(const TYPE *theta, const TYPE *momentum, const TYPE *delta,   \
                                 size_t count, TYPE lr, TYPE mu, TYPE *out_theta,              \
                                 TYPE *out_momentum)                                           \
    {                                                                                          \
        INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                   \
            TYPE kept = momentum[i] * mu;                                                      \
            kept = kept + delta[i];                                                            \
            TYPE step = kept * mu;                                                             \
            step = step + delta[i];                                                            \
            step = step * lr;                                                                  \
            out_theta[i] = theta[i] - step;                                                    \
            out_momentum[i] = kept;                                                            \
        }                                                                                      \
    }                                                                                          \
    static void heavy_ball_##WIDTH(const TYPE *theta, const TYPE *momentum, const TYPE *delta, \
                                   size_t count, TYPE lr, TYPE mu, TYPE *out_theta,            \
                                   TYPE *out_momentum)                                         \
    {                                                                                          \
        INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                   \
            TYPE kept = momentum[i] * mu;                                                      \
            kept = kept + delta[i];                                                            \
            TYPE step = kept * lr;                                                             \
            out_theta[i] = theta[i] - step;                                                    \
            out_momentum[i] = kept;                                                            \
        }                                                                                      \
    }                                                                                          \
    static void sgd_##WIDTH(const TYPE *theta, const TYPE *momentum, const TYPE *delta,        \
                            size_t count, TYPE lr, TYPE mu, TYPE *out_theta,                   \
                            TYPE *out_momentum)                                                \
    {                                                                                          \
        (void)mu;                                                                              \
        INDEPENDENT                                                                            \
        for (size_t i = 0; i < count; i++) {                                                   \
            TYPE step = delta[i] * lr;                                                         \
            out_theta[i] = theta[i] - step;                                                    \
            out_momentum[i] = momentum[i];                                                     \
        }                                                                                      \
    }

OUTER_STEPS(float, float32)
OUTER_STEPS(double, float64)
