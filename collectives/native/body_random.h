/* Random numbers as a function of (key, index), as in collectives/counter_rng.py. Included by
 * kernels_body.h. */

enum { KEY_BYTES = 8 };

typedef struct {
    uint32_t low, high;
} stream;

/* One step of splitmix64. */
INLINE stream stream_of(uint64_t key)
{
    uint64_t mixed = key + 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    mixed ^= mixed >> 31;
    stream halves = {(uint32_t)mixed, (uint32_t)(mixed >> 32)};
    return halves;
}

INLINE uint32_t word_of(stream key, uint32_t index)
{
    uint32_t x = index * 0x9E3779B9u + key.low;
    x = (x ^ x >> 16) * 0x7FEB352Du + key.high;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

/* A multiple of 2^-24 in [0, 1). */
INLINE float unit_float(uint32_t word)
{
    return (float)(int32_t)(word >> 8) * 0x1p-24f;
}
