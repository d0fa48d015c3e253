/* topk: the 64 largest of each 4096 elements, of a short last block one for each 64, rounded up.
 *
 * A lookup of four values comes first, then K places of 12 bits within their blocks, then K codes of
 * 2 bits. The numpy form is in codecs/sparse.py. Included by kernels_body.h.
 */

enum { TOP_BLOCK = PIECE, TOP_KEPT = 64, ONE_OF = 64, LOOKUP = 4, LOOKUP_BYTES = 16 };
/* The places of a whole block. */
enum { PLACES_BYTES = TOP_KEPT * 12 / 8 };

INLINE size_t kept_of(size_t count)
{
    return count / ONE_OF + (count % ONE_OF != 0);
}

INLINE size_t topk_codes_at(size_t count)
{
    size_t kept = kept_of(count);
    return LOOKUP_BYTES + kept / 2 * 3 + kept % 2 * 2;
}

static size_t bytes_topk(size_t count)
{
    size_t kept = kept_of(count);
    return topk_codes_at(count) + kept / 4 + (kept % 4 != 0);
}

INLINE size_t top_blocks(size_t count)
{
    return count / TOP_BLOCK + (count % TOP_BLOCK != 0);
}

INLINE size_t top_width(size_t count, size_t block)
{
    size_t rest = count - TOP_BLOCK * block;
    return rest < TOP_BLOCK ? rest : TOP_BLOCK;
}

/* ---------------------------------------------------------------- selecting */

/* Values are dealt out to so many groups, which vectorizes. The keep-th largest of the groups' largest
 * magnitudes has `keep` others at or above it at least, and few more: those are looked at one by one. */
enum { GROUPS = 256 };
/* Bytes that are looked at together. */
enum { WORD = 8 };

INLINE size_t count_from(const int32_t *restrict numbers, size_t count, int32_t lowest)
{
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += numbers[i] >= lowest;
    return found;
}

/* The n-th largest of numbers from `low` to `high`. */
INLINE int32_t nth_largest(const int32_t *restrict numbers, size_t count, size_t n, int32_t low,
                           int32_t high)
{
    while (low < high) { /* n or more lie at or above `low`, fewer above `high` */
        int32_t middle = low + (high - low + 1) / 2;
        if (count_from(numbers, count, middle) >= n)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The largest magnitude of each group; a group without a value has 0. */
INLINE void group_tops(const float *restrict values, size_t count, int32_t *restrict tops)
{
    memset(tops, 0, sizeof *tops * GROUPS);
    for (size_t row = 0; row < count; row += GROUPS) {
        size_t width = count - row < GROUPS ? count - row : GROUPS;
        for (size_t group = 0; group < width; group++) {
            int32_t bits = bits_of(values[row + group]) & MAGNITUDE_BITS;
            tops[group] = bits > tops[group] ? bits : tops[group];
        }
    }
}

/* Those of magnitude `bound` and more, in their order; how many they are. */
INLINE size_t find_candidates(const float *restrict values, size_t count, int32_t bound,
                              int32_t *restrict magnitudes, uint16_t *restrict indices)
{
    uint8_t found[TOP_BLOCK + WORD];
    size_t candidates = 0;
    for (size_t i = 0; i < count; i++)
        found[i] = (bits_of(values[i]) & MAGNITUDE_BITS) >= bound;
    memset(found + count, 0, WORD);
    for (size_t i = 0; i < count; i += WORD) {
        uint64_t word;
        memcpy(&word, found + i, sizeof word);
        for (size_t j = i; word != 0; j++, word >>= 8)
            if (word & 1) {
                magnitudes[candidates] = bits_of(values[j]) & MAGNITUDE_BITS;
                indices[candidates++] = (uint16_t)j;
            }
    }
    return candidates;
}

/* The indices, ascending, of the `keep` largest magnitudes among values; of equal ones the first.
 * 1 <= keep <= GROUPS, and keep <= count <= TOP_BLOCK. 0 if a value is NaN or infinite. */
static int select_top(const float *values, size_t count, size_t keep, uint16_t *out)
{
    int32_t tops[GROUPS], magnitudes[TOP_BLOCK], highest = 0;
    uint16_t indices[TOP_BLOCK];
    group_tops(values, count, tops);
    for (size_t group = 0; group < GROUPS; group++)
        highest = tops[group] > highest ? tops[group] : highest;
    if (highest >= INFINITY_BITS)
        return 0;
    int32_t bound = nth_largest(tops, GROUPS, keep, 0, highest);
    size_t candidates = find_candidates(values, count, bound, magnitudes, indices);
    int32_t lowest = nth_largest(magnitudes, candidates, keep, bound, highest);
    size_t ties = keep - count_from(magnitudes, candidates, lowest + 1), found = 0;
    for (size_t i = 0; i < candidates && found < keep; i++) {
        int tie = magnitudes[i] == lowest;
        if (magnitudes[i] > lowest || (tie && ties > 0)) {
            ties -= (size_t)tie;
            out[found++] = indices[i];
        }
    }
    return 1;
}

/* ---------------------------------------------------------------- packing */

/* Two places to three bytes, low bits first; the bits after the last are 0. */
INLINE void pack12(const uint16_t *restrict places, size_t count, uint8_t *restrict out)
{
    for (size_t i = 0; i + 1 < count; i += 2, out += 3) {
        out[0] = (uint8_t)places[i];
        out[1] = (uint8_t)(places[i] >> 8 | places[i + 1] << 4);
        out[2] = (uint8_t)(places[i + 1] >> 4);
    }
    if (count % 2) {
        out[0] = (uint8_t)places[count - 1];
        out[1] = (uint8_t)(places[count - 1] >> 8);
    }
}

/* 0 if the bits after the last are not 0. */
INLINE int unpack12(const uint8_t *restrict data, size_t count, uint16_t *restrict places)
{
    for (size_t i = 0; i + 1 < count; i += 2, data += 3) {
        places[i] = (uint16_t)(data[0] | (data[1] & 0x0F) << 8);
        places[i + 1] = (uint16_t)(data[1] >> 4 | data[2] << 4);
    }
    if (count % 2 == 0)
        return 1;
    places[count - 1] = (uint16_t)(data[0] | (data[1] & 0x0F) << 8);
    return data[1] >> 4 == 0;
}

/* The places of one block, which begins at element TOP_BLOCK * block. */
INLINE int places_of(const uint8_t *restrict data, size_t block, size_t keep,
                     uint16_t *restrict places)
{
    return unpack12(data + LOOKUP_BYTES + PLACES_BYTES * block, keep, places);
}

/* ---------------------------------------------------------------- encoding */

/* -0 is what a sum begins with so that it equals its first term even where that is -0. */
#define NO_TERM (-0.0)

/* The places of all blocks, and the mean of what lies there: sums go from the first to the last. */
INLINE int encode_places(const float *restrict values, size_t count, uint8_t *restrict out,
                         double *mean)
{
    double sum = NO_TERM;
    for (size_t block = 0; block < top_blocks(count); block++) {
        uint16_t places[TOP_KEPT];
        const float *row = values + TOP_BLOCK * block;
        size_t width = top_width(count, block), keep = kept_of(width);
        if (!select_top(row, width, keep, places))
            return 0;
        for (size_t i = 0; i < keep; i++)
            sum = sum + (double)row[places[i]];
        pack12(places, keep, out + LOOKUP_BYTES + PLACES_BYTES * block);
    }
    *mean = sum / (double)kept_of(count);
    return 1;
}

INLINE double variance_of(const float *restrict values, size_t count, const uint8_t *restrict data,
                          double mean)
{
    double sum = NO_TERM;
    for (size_t block = 0; block < top_blocks(count); block++) {
        uint16_t places[TOP_KEPT];
        size_t keep = kept_of(top_width(count, block));
        places_of(data, block, keep, places);
        for (size_t i = 0; i < keep; i++) {
            double centred = (double)values[TOP_BLOCK * block + places[i]] - mean;
            double square = centred * centred;
            sum = sum + square;
        }
    }
    return sum / (double)kept_of(count);
}

/* The bin of a value that is so many steps from the mean: rint(steps + 2) between 0 and 3, ties to
 * even. */
INLINE unsigned bin_of(double steps)
{
    double at = steps + 2.0;
    return (unsigned)(at > 0.5) + (at >= 1.5) + (at > 2.5);
}

/* A mean of values, rounded to float32; what is no normal number is sent as 0. */
INLINE float lookup_value(double sum, size_t members)
{
    float value = members ? (float)(sum / (double)members) : 0.0f;
    return (bits_of(value) & MAGNITUDE_BITS) < bits_of(FLT_MIN) ? 0.0f : value;
}

static int encode_topk(const float *values, size_t count, uint64_t key, uint8_t *out)
{
    (void)key;
    double mean, sums[LOOKUP] = {NO_TERM, NO_TERM, NO_TERM, NO_TERM};
    size_t members[LOOKUP] = {0};
    if (!encode_places(values, count, out, &mean))
        return 0;
    double step = 6.0 * sqrt(variance_of(values, count, out, mean));
    step = step / 4.0;
    step = step > 0.0 ? step : 1.0;
    uint8_t *codes = out + topk_codes_at(count);
    for (size_t block = 0; block < top_blocks(count); block++) {
        uint16_t places[TOP_KEPT];
        uint8_t packed[TOP_KEPT / 4] = {0};
        size_t keep = kept_of(top_width(count, block));
        places_of(out, block, keep, places);
        for (size_t i = 0; i < keep; i++) {
            double value = (double)values[TOP_BLOCK * block + places[i]];
            unsigned bin = bin_of((value - mean) / step);
            sums[bin] = sums[bin] + value;
            members[bin]++;
            packed[i / 4] |= (uint8_t)(bin << 2 * (i % 4));
        }
        memcpy(codes + sizeof packed * block, packed, keep / 4 + (keep % 4 != 0));
    }
    for (size_t bin = 0; bin < LOOKUP; bin++) {
        float value = lookup_value(sums[bin], members[bin]);
        memcpy(out + sizeof value * bin, &value, sizeof value);
    }
    return 1;
}

/* ---------------------------------------------------------------- checking and decoding */

/* A value is +0 or a normal number. */
INLINE int lookup_allowed(const uint8_t *data)
{
    int wrong = 0;
    for (size_t bin = 0; bin < LOOKUP; bin++) {
        int32_t bits = bits_of(float_at(data, bin)), magnitude = bits & MAGNITUDE_BITS;
        wrong |= bits != 0 && (magnitude < bits_of(FLT_MIN) || magnitude >= INFINITY_BITS);
    }
    return !wrong;
}

/* Places ascend within their block and do not leave it, which 12 bits could in the last one only. */
static int check_topk(const uint8_t *data, size_t count)
{
    size_t kept = kept_of(count);
    const uint8_t *codes = data + topk_codes_at(count);
    int allowed = lookup_allowed(data);
    allowed &= kept % 4 == 0 || codes[kept / 4] >> 2 * (kept % 4) == 0;
    for (size_t block = 0; block < top_blocks(count); block++) {
        uint16_t places[TOP_KEPT];
        size_t width = top_width(count, block), keep = kept_of(width);
        allowed &= places_of(data, block, keep, places);
        for (size_t i = 1; i < keep; i++)
            allowed &= places[i - 1] < places[i];
        allowed &= places[keep - 1] < width;
    }
    return allowed;
}

/* The `count` elements from `lo`, the first of a block, to the end of one, of `total`. What would lie
 * beyond its block, as `check` does not let it, is left out. */
INLINE void decode_top(int add, const uint8_t *restrict data, size_t total, size_t lo, size_t count,
                       float factor, float *restrict out)
{
    const size_t first = lo / TOP_BLOCK;
    const uint8_t *codes = data + topk_codes_at(total) + TOP_KEPT / 4 * first;
    float lookup[LOOKUP];
    for (size_t bin = 0; bin < LOOKUP; bin++)
        lookup[bin] = add ? float_at(data, bin) * factor : float_at(data, bin);
    for (size_t block = 0; block < top_blocks(count); block++) {
        uint16_t places[TOP_KEPT];
        float *row = out + TOP_BLOCK * block;
        size_t width = top_width(count, block), keep = kept_of(width);
        places_of(data, first + block, keep, places);
        if (!add)
            memset(row, 0, sizeof *row * width);
        for (size_t i = 0; i < keep; i++) {
            float value = lookup[codes[(TOP_KEPT * block + i) / 4] >> 2 * (i % 4) & 3];
            if (places[i] < width)
                row[places[i]] = add ? row[places[i]] + value : value;
        }
    }
}

static void decode_topk(const uint8_t *data, size_t total, size_t lo, size_t count, float *out)
{
    decode_top(0, data, total, lo, count, 0.0f, out);
}

static void decode_add_topk(const uint8_t *data, size_t count, float factor, float *into)
{
    decode_top(1, data, count, 0, count, factor, into);
}
