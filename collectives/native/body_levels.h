/* fp8_e4m3, fp8_e5m2 and dynamic8: a byte for each element, the nearest of uneven levels. The numpy forms
 * are in codecs/levels.py, and those of the scales in codecs/scales.py. Included by kernels_body.h.
 *
 * All scales come first, then all codes. */

/* ---------------------------------------------------------------- fp8: small floats
 *
 * Block of 32, one scale of E8M0: 2^(byte - 127), and 0 for byte 0. Codes are sign and magnitude. A
 * magnitude is rounded like the last bit of a mantissa; below the smallest normal level by an addition
 * to `steps`, among floats as far apart as the levels are there. What is larger than the top takes it. */

enum { SMALL_BLOCK = 32 };

typedef struct {
    int shift;          /* mantissa bits that float32 has more */
    int32_t bias;       /* of a level's index, above the bits that are left */
    int32_t normal;     /* the smallest normal level, as float32's bits */
    float steps;
    int32_t top;        /* index of the largest level: codes beyond are NaN or infinite */
    int32_t exponent;   /* of the largest level */
    uint8_t scale_min, scale_max;
} small_float;

static const small_float E4M3 = {20, 120 << 3, (127 - 6) << 23, 0x1p14f, 0x7E, 8, 10, 246};
static const small_float E5M2 = {21, 112 << 2, (127 - 14) << 23, 0x1p7f, 0x7B, 15, 17, 239};

INLINE uint8_t small_code(const small_float *form, float scaled)
{
    int32_t bits = bits_of(scaled), magnitude = bits & MAGNITUDE_BITS;
    int32_t half = (1 << (form->shift - 1)) - 1;
    int32_t normal = ((magnitude + half + (magnitude >> form->shift & 1)) >> form->shift) - form->bias;
    int32_t subnormal = bits_of(float_of(magnitude) + form->steps) - bits_of(form->steps);
    int32_t small = -(magnitude < form->normal);
    int32_t index = (subnormal & small) | (normal & ~small);
    index = index < form->top ? index : form->top;
    return (uint8_t)(index | (int32_t)((uint32_t)bits >> 24 & 0x80));
}

INLINE float small_level(const small_float *form, uint8_t code)
{
    int32_t index = code & 0x7F;
    int32_t normal = (index + form->bias) << form->shift;
    int32_t subnormal = bits_of(float_of(index + bits_of(form->steps)) - form->steps);
    int32_t small = -(normal < form->normal);
    int32_t bits = (subnormal & small) | (normal & ~small);
    return float_of((int32_t)((uint32_t)bits | (uint32_t)(code & 0x80) << 24));
}

INLINE int encode_small_block(const small_float *form, const float *restrict values, size_t count,
                              uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = largest_magnitude_bits(values, count);
    if (top >= INFINITY_BITS)
        return 0;
    int32_t scale = (top >> 23) - form->exponent;
    scale = scale < form->scale_min ? 0 : scale;
    *scale_out = (uint8_t)scale;
    /* Where the scale is 0 the values are so small that they round to 0 when divided by 1. To
     * divide by a power of two is to multiply with the opposite one. */
    float factor = float_of((254 - (scale ? scale : 127)) << 23);
    for (size_t i = 0; i < count; i++)
        codes[i] = small_code(form, values[i] * factor);
    return 1;
}

INLINE size_t small_blocks(size_t count)
{
    return count / SMALL_BLOCK + (count % SMALL_BLOCK != 0);
}

INLINE int encode_small(const small_float *form, const float *restrict values, size_t count,
                        uint8_t *restrict out)
{
    size_t whole = count / SMALL_BLOCK, rest = count % SMALL_BLOCK;
    uint8_t *codes = out + small_blocks(count);
    for (size_t block = 0; block < whole; block++)
        if (!encode_small_block(form, values + SMALL_BLOCK * block, SMALL_BLOCK, out + block,
                                codes + SMALL_BLOCK * block))
            return 0;
    return rest == 0 || encode_small_block(form, values + SMALL_BLOCK * whole, rest, out + whole,
                                           codes + SMALL_BLOCK * whole);
}

INLINE int check_small(const small_float *form, const uint8_t *restrict data, size_t count)
{
    size_t blocks = small_blocks(count);
    const uint8_t *codes = data + blocks;
    uint8_t wrong = 0;
    for (size_t block = 0; block < blocks; block++)
        wrong |= (data[block] != 0) & ((data[block] < form->scale_min) | (data[block] > form->scale_max));
    for (size_t i = 0; i < count; i++)
        wrong |= (codes[i] & 0x7F) > form->top;
    return !wrong;
}

INLINE void decode_small(const small_float *form, int add, const uint8_t *restrict data, size_t total,
                         size_t lo, size_t count, float factor, float *restrict out)
{
    const uint8_t *scales = data + lo / SMALL_BLOCK, *codes = data + small_blocks(total) + lo;
    for (size_t first = 0; first < count; first += SMALL_BLOCK) {
        size_t width = count - first < SMALL_BLOCK ? count - first : SMALL_BLOCK;
        float scale = float_of((int32_t)scales[first / SMALL_BLOCK] << 23);
        for (size_t i = first; i < first + width; i++) {
            float value = small_level(form, codes[i]) * scale;
            if (add) {
                value = value * factor;
                out[i] = out[i] + value;
            } else {
                out[i] = value;
            }
        }
    }
}

#define SMALL_FUNCTIONS(NAME, FORM)                                                           \
    static size_t bytes_##NAME(size_t count)                                                  \
    {                                                                                         \
        return small_blocks(count) + count;                                                   \
    }                                                                                         \
    static int encode_##NAME(const float *values, size_t count, uint64_t key, uint8_t *out)   \
    {                                                                                         \
        (void)key;                                                                            \
        return encode_small(&FORM, values, count, out);                                       \
    }                                                                                         \
    static int check_##NAME(const uint8_t *data, size_t count)                                \
    {                                                                                         \
        return check_small(&FORM, data, count);                                               \
    }                                                                                         \
    static void decode_##NAME(const uint8_t *data, size_t total, size_t lo, size_t count,     \
                              float *out)                                                     \
    {                                                                                         \
        decode_small(&FORM, 0, data, total, lo, count, 0.0f, out);                            \
    }                                                                                         \
    static void decode_add_##NAME(const uint8_t *data, size_t count, float factor, float *into) \
    {                                                                                         \
        decode_small(&FORM, 1, data, count, 0, count, factor, into);                          \
    }

SMALL_FUNCTIONS(fp8_e4m3, E4M3)
SMALL_FUNCTIONS(fp8_e5m2, E5M2)

/* ---------------------------------------------------------------- dynamic8
 *
 * Block of 256, one float32 scale: the value of largest magnitude, with its sign. Codes count the levels
 * from the lowest. The positive ones are 2^i middles of equal parts of each decade i = 0 ... 6, and 1;
 * so from a magnitude follow its decade and its part, but for the last bits of both. They are found for a
 * value that is a little lower: then the code is theirs or the next, as the exact threshold says. */

enum { DYNAMIC_BLOCK = 256, DYNAMIC_ZERO = 127 };
#define DYNAMIC_SCALE_MIN 0x1p-105f /* with it the smallest level is a normal number */
#define DYNAMIC_SLACK 0x1p-18f

/* Of decade i, which ends at 10^(i - 6). */
static const float DECADE_ENDS[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
#define PARTS(I) ((float)(1 << (I)) / (0.9f * DECADE_ENDS[I]))

/* levels.DYNAMIC_LEVELS, and Levels.thresholds of them: what a value must exceed to leave a code. */
static const float DYNAMIC_LEVELS[256] = {
    -0x1.fc6666p-1f, -0x1.f53334p-1f, -0x1.ee0000p-1f, -0x1.e6ccccp-1f,
    -0x1.df999ap-1f, -0x1.d86666p-1f, -0x1.d13334p-1f, -0x1.ca0000p-1f,
    -0x1.c2ccccp-1f, -0x1.bb999ap-1f, -0x1.b46666p-1f, -0x1.ad3334p-1f,
    -0x1.a60000p-1f, -0x1.9eccccp-1f, -0x1.97999ap-1f, -0x1.906666p-1f,
    -0x1.893334p-1f, -0x1.820000p-1f, -0x1.7accccp-1f, -0x1.73999ap-1f,
    -0x1.6c6666p-1f, -0x1.653334p-1f, -0x1.5e0000p-1f, -0x1.56ccccp-1f,
    -0x1.4f999ap-1f, -0x1.486666p-1f, -0x1.413334p-1f, -0x1.3a0000p-1f,
    -0x1.32ccccp-1f, -0x1.2b999ap-1f, -0x1.246666p-1f, -0x1.1d3334p-1f,
    -0x1.160000p-1f, -0x1.0eccccp-1f, -0x1.07999ap-1f, -0x1.006666p-1f,
    -0x1.f26666p-2f, -0x1.e40000p-2f, -0x1.d5999ap-2f, -0x1.c73334p-2f,
    -0x1.b8ccccp-2f, -0x1.aa6666p-2f, -0x1.9c0000p-2f, -0x1.8d999ap-2f,
    -0x1.7f3334p-2f, -0x1.70ccccp-2f, -0x1.626666p-2f, -0x1.540000p-2f,
    -0x1.45999ap-2f, -0x1.373334p-2f, -0x1.28ccccp-2f, -0x1.1a6666p-2f,
    -0x1.0c0000p-2f, -0x1.fb3334p-3f, -0x1.de6666p-3f, -0x1.c1999ap-3f,
    -0x1.a4ccccp-3f, -0x1.880000p-3f, -0x1.6b3334p-3f, -0x1.4e6666p-3f,
    -0x1.31999ap-3f, -0x1.14ccccp-3f, -0x1.f00000p-4f, -0x1.b66666p-4f,
    -0x1.93d70ap-4f, -0x1.8851ecp-4f, -0x1.7cccccp-4f, -0x1.7147aep-4f,
    -0x1.65c290p-4f, -0x1.5a3d70p-4f, -0x1.4eb852p-4f, -0x1.433334p-4f,
    -0x1.37ae14p-4f, -0x1.2c28f6p-4f, -0x1.20a3d8p-4f, -0x1.151eb8p-4f,
    -0x1.09999ap-4f, -0x1.fc28f6p-5f, -0x1.e51eb8p-5f, -0x1.ce147ap-5f,
    -0x1.b70a3ep-5f, -0x1.a00000p-5f, -0x1.88f5c2p-5f, -0x1.71eb86p-5f,
    -0x1.5ae148p-5f, -0x1.43d70ap-5f, -0x1.2cccccp-5f, -0x1.15c290p-5f,
    -0x1.fd70a4p-6f, -0x1.cf5c28p-6f, -0x1.a147aep-6f, -0x1.733334p-6f,
    -0x1.451eb8p-6f, -0x1.170a3ep-6f, -0x1.d1eb86p-7f, -0x1.75c290p-7f,
    -0x1.3e76c8p-7f, -0x1.2c0832p-7f, -0x1.19999ap-7f, -0x1.072b02p-7f,
    -0x1.e978d4p-8f, -0x1.c49ba6p-8f, -0x1.9fbe76p-8f, -0x1.7ae148p-8f,
    -0x1.560418p-8f, -0x1.3126eap-8f, -0x1.0c49bap-8f, -0x1.ced916p-9f,
    -0x1.851eb8p-9f, -0x1.3b645ap-9f, -0x1.e353f8p-10f, -0x1.4fdf3cp-10f,
    -0x1.eecbfcp-11f, -0x1.b3d07cp-11f, -0x1.78d4fep-11f, -0x1.3dd980p-11f,
    -0x1.02de00p-11f, -0x1.8fc504p-12f, -0x1.19ce08p-12f, -0x1.47ae14p-13f,
    -0x1.743e96p-14f, -0x1.15df66p-14f, -0x1.6f0068p-15f, -0x1.64840ep-16f,
    -0x1.040bfep-17f, -0x1.b43526p-19f, -0x1.27476cp-21f, 0x0.0p+0f,
    0x1.27476cp-21f, 0x1.b43526p-19f, 0x1.040bfep-17f, 0x1.64840ep-16f,
    0x1.6f0068p-15f, 0x1.15df66p-14f, 0x1.743e96p-14f, 0x1.47ae14p-13f,
    0x1.19ce08p-12f, 0x1.8fc504p-12f, 0x1.02de00p-11f, 0x1.3dd980p-11f,
    0x1.78d4fep-11f, 0x1.b3d07cp-11f, 0x1.eecbfcp-11f, 0x1.4fdf3cp-10f,
    0x1.e353f8p-10f, 0x1.3b645ap-9f, 0x1.851eb8p-9f, 0x1.ced916p-9f,
    0x1.0c49bap-8f, 0x1.3126eap-8f, 0x1.560418p-8f, 0x1.7ae148p-8f,
    0x1.9fbe76p-8f, 0x1.c49ba6p-8f, 0x1.e978d4p-8f, 0x1.072b02p-7f,
    0x1.19999ap-7f, 0x1.2c0832p-7f, 0x1.3e76c8p-7f, 0x1.75c290p-7f,
    0x1.d1eb86p-7f, 0x1.170a3ep-6f, 0x1.451eb8p-6f, 0x1.733334p-6f,
    0x1.a147aep-6f, 0x1.cf5c28p-6f, 0x1.fd70a4p-6f, 0x1.15c290p-5f,
    0x1.2cccccp-5f, 0x1.43d70ap-5f, 0x1.5ae148p-5f, 0x1.71eb86p-5f,
    0x1.88f5c2p-5f, 0x1.a00000p-5f, 0x1.b70a3ep-5f, 0x1.ce147ap-5f,
    0x1.e51eb8p-5f, 0x1.fc28f6p-5f, 0x1.09999ap-4f, 0x1.151eb8p-4f,
    0x1.20a3d8p-4f, 0x1.2c28f6p-4f, 0x1.37ae14p-4f, 0x1.433334p-4f,
    0x1.4eb852p-4f, 0x1.5a3d70p-4f, 0x1.65c290p-4f, 0x1.7147aep-4f,
    0x1.7cccccp-4f, 0x1.8851ecp-4f, 0x1.93d70ap-4f, 0x1.b66666p-4f,
    0x1.f00000p-4f, 0x1.14ccccp-3f, 0x1.31999ap-3f, 0x1.4e6666p-3f,
    0x1.6b3334p-3f, 0x1.880000p-3f, 0x1.a4ccccp-3f, 0x1.c1999ap-3f,
    0x1.de6666p-3f, 0x1.fb3334p-3f, 0x1.0c0000p-2f, 0x1.1a6666p-2f,
    0x1.28ccccp-2f, 0x1.373334p-2f, 0x1.45999ap-2f, 0x1.540000p-2f,
    0x1.626666p-2f, 0x1.70ccccp-2f, 0x1.7f3334p-2f, 0x1.8d999ap-2f,
    0x1.9c0000p-2f, 0x1.aa6666p-2f, 0x1.b8ccccp-2f, 0x1.c73334p-2f,
    0x1.d5999ap-2f, 0x1.e40000p-2f, 0x1.f26666p-2f, 0x1.006666p-1f,
    0x1.07999ap-1f, 0x1.0eccccp-1f, 0x1.160000p-1f, 0x1.1d3334p-1f,
    0x1.246666p-1f, 0x1.2b999ap-1f, 0x1.32ccccp-1f, 0x1.3a0000p-1f,
    0x1.413334p-1f, 0x1.486666p-1f, 0x1.4f999ap-1f, 0x1.56ccccp-1f,
    0x1.5e0000p-1f, 0x1.653334p-1f, 0x1.6c6666p-1f, 0x1.73999ap-1f,
    0x1.7accccp-1f, 0x1.820000p-1f, 0x1.893334p-1f, 0x1.906666p-1f,
    0x1.97999ap-1f, 0x1.9eccccp-1f, 0x1.a60000p-1f, 0x1.ad3334p-1f,
    0x1.b46666p-1f, 0x1.bb999ap-1f, 0x1.c2ccccp-1f, 0x1.ca0000p-1f,
    0x1.d13334p-1f, 0x1.d86666p-1f, 0x1.df999ap-1f, 0x1.e6ccccp-1f,
    0x1.ee0000p-1f, 0x1.f53334p-1f, 0x1.fc6666p-1f, 0x1.000000p+0f,
};

static const float DYNAMIC_THRESHOLDS[256] = {
    -0x1.f8cccep-1f, -0x1.f1999cp-1f, -0x1.ea6666p-1f, -0x1.e33334p-1f,
    -0x1.dc0000p-1f, -0x1.d4cccep-1f, -0x1.cd999ap-1f, -0x1.c66668p-1f,
    -0x1.bf3334p-1f, -0x1.b80002p-1f, -0x1.b0cccep-1f, -0x1.a9999cp-1f,
    -0x1.a26666p-1f, -0x1.9b3334p-1f, -0x1.940000p-1f, -0x1.8ccccep-1f,
    -0x1.85999ap-1f, -0x1.7e6668p-1f, -0x1.773334p-1f, -0x1.700002p-1f,
    -0x1.68cccep-1f, -0x1.61999cp-1f, -0x1.5a6666p-1f, -0x1.533334p-1f,
    -0x1.4c0000p-1f, -0x1.44cccep-1f, -0x1.3d999ap-1f, -0x1.366668p-1f,
    -0x1.2f3334p-1f, -0x1.280002p-1f, -0x1.20cccep-1f, -0x1.19999cp-1f,
    -0x1.126666p-1f, -0x1.0b3334p-1f, -0x1.040000p-1f, -0x1.f9999ap-2f,
    -0x1.eb3334p-2f, -0x1.dccccep-2f, -0x1.ce6668p-2f, -0x1.c00002p-2f,
    -0x1.b1999ap-2f, -0x1.a33334p-2f, -0x1.94cccep-2f, -0x1.866668p-2f,
    -0x1.780000p-2f, -0x1.69999ap-2f, -0x1.5b3334p-2f, -0x1.4ccccep-2f,
    -0x1.3e6668p-2f, -0x1.300002p-2f, -0x1.21999ap-2f, -0x1.133334p-2f,
    -0x1.04cccep-2f, -0x1.eccccep-3f, -0x1.d00000p-3f, -0x1.b33334p-3f,
    -0x1.966666p-3f, -0x1.79999cp-3f, -0x1.5ccccep-3f, -0x1.400002p-3f,
    -0x1.233334p-3f, -0x1.066668p-3f, -0x1.d33334p-4f, -0x1.a51ebap-4f,
    -0x1.8e147cp-4f, -0x1.828f5ep-4f, -0x1.770a3ep-4f, -0x1.6b8520p-4f,
    -0x1.600000p-4f, -0x1.547ae2p-4f, -0x1.48f5c4p-4f, -0x1.3d70a6p-4f,
    -0x1.31eb86p-4f, -0x1.266668p-4f, -0x1.1ae148p-4f, -0x1.0f5c2ap-4f,
    -0x1.03d70cp-4f, -0x1.f0a3d8p-5f, -0x1.d9999ap-5f, -0x1.c28f5ep-5f,
    -0x1.ab8520p-5f, -0x1.947ae2p-5f, -0x1.7d70a4p-5f, -0x1.666668p-5f,
    -0x1.4f5c2ap-5f, -0x1.3851ecp-5f, -0x1.2147aep-5f, -0x1.0a3d72p-5f,
    -0x1.e66666p-6f, -0x1.b851ecp-6f, -0x1.8a3d72p-6f, -0x1.5c28f8p-6f,
    -0x1.2e147cp-6f, -0x1.000002p-6f, -0x1.a3d70cp-7f, -0x1.5a1caep-7f,
    -0x1.353f7ep-7f, -0x1.22d0e8p-7f, -0x1.10624ep-7f, -0x1.fbe76ep-8f,
    -0x1.d70a3ep-8f, -0x1.b22d10p-8f, -0x1.8d4fe0p-8f, -0x1.6872b2p-8f,
    -0x1.439582p-8f, -0x1.1eb854p-8f, -0x1.f3b646p-9f, -0x1.a9fbe8p-9f,
    -0x1.60418ap-9f, -0x1.16872cp-9f, -0x1.99999ap-10f, -0x1.23a29ep-10f,
    -0x1.d14e3cp-11f, -0x1.9652bep-11f, -0x1.5b5740p-11f, -0x1.205bc2p-11f,
    -0x1.cac082p-12f, -0x1.54c988p-12f, -0x1.bda512p-13f, -0x1.00e6b0p-13f,
    -0x1.450efep-14f, -0x1.cd5f9cp-15f, -0x1.10a138p-15f, -0x1.e68a0ep-17f,
    -0x1.711948p-18f, -0x1.fe0702p-20f, -0x1.27476cp-22f, 0x1.27476ap-22f,
    0x1.fe0700p-20f, 0x1.711946p-18f, 0x1.e68a0cp-17f, 0x1.10a136p-15f,
    0x1.cd5f9ap-15f, 0x1.450efcp-14f, 0x1.00e6aep-13f, 0x1.bda510p-13f,
    0x1.54c986p-12f, 0x1.cac080p-12f, 0x1.205bc0p-11f, 0x1.5b573ep-11f,
    0x1.9652bcp-11f, 0x1.d14e3ap-11f, 0x1.23a29cp-10f, 0x1.999998p-10f,
    0x1.16872ap-9f, 0x1.604188p-9f, 0x1.a9fbe6p-9f, 0x1.f3b644p-9f,
    0x1.1eb852p-8f, 0x1.439580p-8f, 0x1.6872b0p-8f, 0x1.8d4fdep-8f,
    0x1.b22d0ep-8f, 0x1.d70a3cp-8f, 0x1.fbe76cp-8f, 0x1.10624cp-7f,
    0x1.22d0e6p-7f, 0x1.353f7cp-7f, 0x1.5a1cacp-7f, 0x1.a3d70ap-7f,
    0x1.000000p-6f, 0x1.2e147ap-6f, 0x1.5c28f6p-6f, 0x1.8a3d70p-6f,
    0x1.b851eap-6f, 0x1.e66664p-6f, 0x1.0a3d70p-5f, 0x1.2147acp-5f,
    0x1.3851eap-5f, 0x1.4f5c28p-5f, 0x1.666666p-5f, 0x1.7d70a2p-5f,
    0x1.947ae0p-5f, 0x1.ab851ep-5f, 0x1.c28f5cp-5f, 0x1.d99998p-5f,
    0x1.f0a3d6p-5f, 0x1.03d70ap-4f, 0x1.0f5c28p-4f, 0x1.1ae146p-4f,
    0x1.266666p-4f, 0x1.31eb84p-4f, 0x1.3d70a4p-4f, 0x1.48f5c2p-4f,
    0x1.547ae0p-4f, 0x1.5ffffep-4f, 0x1.6b851ep-4f, 0x1.770a3cp-4f,
    0x1.828f5cp-4f, 0x1.8e147ap-4f, 0x1.a51eb8p-4f, 0x1.d33332p-4f,
    0x1.066666p-3f, 0x1.233332p-3f, 0x1.400000p-3f, 0x1.5cccccp-3f,
    0x1.79999ap-3f, 0x1.966664p-3f, 0x1.b33332p-3f, 0x1.cffffep-3f,
    0x1.ecccccp-3f, 0x1.04ccccp-2f, 0x1.133332p-2f, 0x1.219998p-2f,
    0x1.300000p-2f, 0x1.3e6666p-2f, 0x1.4cccccp-2f, 0x1.5b3332p-2f,
    0x1.699998p-2f, 0x1.77fffep-2f, 0x1.866666p-2f, 0x1.94ccccp-2f,
    0x1.a33332p-2f, 0x1.b19998p-2f, 0x1.c00000p-2f, 0x1.ce6666p-2f,
    0x1.dcccccp-2f, 0x1.eb3332p-2f, 0x1.f99998p-2f, 0x1.03fffep-1f,
    0x1.0b3332p-1f, 0x1.126664p-1f, 0x1.19999ap-1f, 0x1.20ccccp-1f,
    0x1.280000p-1f, 0x1.2f3332p-1f, 0x1.366666p-1f, 0x1.3d9998p-1f,
    0x1.44ccccp-1f, 0x1.4bfffep-1f, 0x1.533332p-1f, 0x1.5a6664p-1f,
    0x1.61999ap-1f, 0x1.68ccccp-1f, 0x1.700000p-1f, 0x1.773332p-1f,
    0x1.7e6666p-1f, 0x1.859998p-1f, 0x1.8cccccp-1f, 0x1.93fffep-1f,
    0x1.9b3332p-1f, 0x1.a26664p-1f, 0x1.a9999ap-1f, 0x1.b0ccccp-1f,
    0x1.b80000p-1f, 0x1.bf3332p-1f, 0x1.c66666p-1f, 0x1.cd9998p-1f,
    0x1.d4ccccp-1f, 0x1.dbfffep-1f, 0x1.e33332p-1f, 0x1.ea6664p-1f,
    0x1.f1999ap-1f, 0x1.f8ccccp-1f, 0x1.fe3332p-1f, INFINITY,
};

/* The code of a scaled value from -1 to 1, or the one below. */
INLINE int32_t dynamic_below(float scaled)
{
    int32_t negative = -(bits_of(scaled) < 0);
    float magnitude = float_of(bits_of(scaled) & MAGNITUDE_BITS);
    /* Lower is nearer to 0 for a positive value, and farther away for a negative one. */
    float slack = float_of(bits_of(DYNAMIC_SLACK) | (negative & ~MAGNITUDE_BITS));
    float moved = magnitude * (1.0f - slack);
    /* Parts of a decade in 1, and levels in all decades before, which are as many as a decade's but
     * for one. Selected by masks, which compilers vectorize; who is in a decade is in all before. */
    int32_t at = bits_of(moved), parts_bits = bits_of(PARTS(0)), before = 0;
#define DECADE(I, FIRST)                                                                      \
    {                                                                                         \
        int32_t in = -(at > bits_of(FIRST));                                                  \
        parts_bits ^= (bits_of(PARTS(I - 1)) ^ bits_of(PARTS(I))) & in;                       \
        before |= ((1 << I) - 1) & in;                                                        \
    }
    DECADE(1, 0x1.fe0700p-20f)
    DECADE(2, 0x1.e68a0cp-17f)
    DECADE(3, 0x1.00e6aep-13f)
    DECADE(4, 0x1.23a29cp-10f)
    DECADE(5, 0x1.5a1cacp-7f)
    DECADE(6, 0x1.a51eb8p-4f)
#undef DECADE
    int32_t part = (int32_t)(moved * float_of(parts_bits) - (float)(before + 1) * (1.0f / 9.0f));
    part = part > 0 ? part : 0;
    part = part < before ? part : before;
    int32_t count = (before + part + 1) & -(at > bits_of(0x1.27476ap-22f)); /* positive levels */
    count += ~negative & (at > bits_of(0x1.fe3332p-1f)); /* 1 itself, which is the 128th */
    return DYNAMIC_ZERO + ((count ^ negative) - negative);
}

INLINE int encode_dynamic_block(const float *restrict values, size_t count,
                                uint8_t *restrict scale_out, uint8_t *restrict codes)
{
    int32_t top = largest_magnitude_bits(values, count), positive = 0;
    if (top >= INFINITY_BITS)
        return 0;
    for (size_t i = 0; i < count; i++)
        positive |= bits_of(values[i]) == top;
    float scale = float_of(top), divisor = 1.0f;
    if (scale < DYNAMIC_SCALE_MIN)
        scale = 0.0f; /* such values are so small that they round to 0 when divided by 1 */
    else
        divisor = scale = positive ? scale : -scale;
    memcpy(scale_out, &scale, sizeof scale);
    for (size_t i = 0; i < count; i++) {
        float scaled = values[i] / divisor;
        int32_t code = dynamic_below(scaled);
        codes[i] = (uint8_t)(code + (scaled > DYNAMIC_THRESHOLDS[code]));
    }
    return 1;
}

INLINE size_t dynamic_blocks(size_t count)
{
    return count / DYNAMIC_BLOCK + (count % DYNAMIC_BLOCK != 0);
}

static size_t bytes_dynamic8(size_t count)
{
    return sizeof(float) * dynamic_blocks(count) + count;
}

static int encode_dynamic8(const float *values, size_t count, uint64_t key, uint8_t *out)
{
    size_t whole = count / DYNAMIC_BLOCK, rest = count % DYNAMIC_BLOCK;
    uint8_t *codes = out + sizeof(float) * dynamic_blocks(count);
    (void)key;
    for (size_t block = 0; block < whole; block++)
        if (!encode_dynamic_block(values + DYNAMIC_BLOCK * block, DYNAMIC_BLOCK,
                                  out + sizeof(float) * block, codes + DYNAMIC_BLOCK * block))
            return 0;
    return rest == 0 ||
           encode_dynamic_block(values + DYNAMIC_BLOCK * whole, rest, out + sizeof(float) * whole,
                                codes + DYNAMIC_BLOCK * whole);
}

/* All codes are levels. A scale is +0, or its magnitude is at least the smallest and finite. */
static int check_dynamic8(const uint8_t *data, size_t count)
{
    int32_t wrong = 0;
    for (size_t block = 0; block < dynamic_blocks(count); block++) {
        int32_t bits = bits_of(float_at(data, block)), magnitude = bits & MAGNITUDE_BITS;
        wrong |= (bits != 0) &
                 ((magnitude < bits_of(DYNAMIC_SCALE_MIN)) | (magnitude >= INFINITY_BITS));
    }
    return !wrong;
}

INLINE void decode_dynamic(int add, const uint8_t *restrict data, size_t total, size_t lo,
                           size_t count, float factor, float *restrict out)
{
    const uint8_t *codes = data + sizeof(float) * dynamic_blocks(total) + lo;
    for (size_t first = 0; first < count; first += DYNAMIC_BLOCK) {
        size_t width = count - first < DYNAMIC_BLOCK ? count - first : DYNAMIC_BLOCK;
        float scale = float_at(data, (lo + first) / DYNAMIC_BLOCK);
        for (size_t i = first; i < first + width; i++) {
            float value = DYNAMIC_LEVELS[codes[i]] * scale;
            if (add) {
                value = value * factor;
                out[i] = out[i] + value;
            } else {
                out[i] = value;
            }
        }
    }
}

static void decode_dynamic8(const uint8_t *data, size_t total, size_t lo, size_t count, float *out)
{
    decode_dynamic(0, data, total, lo, count, 0.0f, out);
}

static void decode_add_dynamic8(const uint8_t *data, size_t count, float factor, float *into)
{
    decode_dynamic(1, data, count, 0, count, factor, into);
}
