/* The largest values of a chunk, and small numbers packed. Included by kernels_body.h. */

/* Values are dealt out to so many groups, which vectorizes. If no more than so many are kept, at
 * least as many lie at or above the smallest of the groups' largest magnitudes: few others do. */
enum { GROUPS = 64 };

INLINE size_t count_from(const int32_t *restrict magnitudes, size_t count, int32_t lowest)
{
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += magnitudes[i] >= lowest;
    return found;
}

/* Largest and smallest of the groups' largest magnitudes; a group without a value has 0. */
INLINE int32_t group_bounds(const float *restrict values, size_t count, int32_t *smallest)
{
    int32_t tops[GROUPS] = {0};
    size_t whole = count - count % GROUPS;
    for (size_t row = 0; row < whole; row += GROUPS)
        for (size_t group = 0; group < GROUPS; group++) {
            int32_t bits = bits_of(values[row + group]) & MAGNITUDE_BITS;
            tops[group] = bits > tops[group] ? bits : tops[group];
        }
    for (size_t i = whole; i < count; i++) {
        int32_t bits = bits_of(values[i]) & MAGNITUDE_BITS;
        tops[i - whole] = bits > tops[i - whole] ? bits : tops[i - whole];
    }
    int32_t largest = 0, least = MAGNITUDE_BITS;
    for (size_t group = 0; group < GROUPS; group++) {
        largest = tops[group] > largest ? tops[group] : largest;
        least = tops[group] < least ? tops[group] : least;
    }
    *smallest = least;
    return largest;
}

static int select_top(const float *values, size_t count, size_t keep, uint16_t *out)
{
    int32_t magnitudes[TOP_COUNT_MAX + 1]; /* of the candidates; one place more for the loop */
    uint16_t indices[TOP_COUNT_MAX + 1];
    int32_t lowest, highest = group_bounds(values, count, &lowest);
    if (highest >= INFINITY_BITS)
        return 0;
    if (keep > GROUPS)
        lowest = 0;
    size_t candidates = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t bits = bits_of(values[i]) & MAGNITUDE_BITS;
        magnitudes[candidates] = bits;
        indices[candidates] = (uint16_t)i;
        candidates += bits >= lowest;
    }
    while (lowest < highest) { /* `keep` or more lie at or above `lowest`, fewer above `highest` */
        int32_t middle = lowest + (highest - lowest + 1) / 2;
        if (count_from(magnitudes, candidates, middle) >= keep)
            lowest = middle;
        else
            highest = middle - 1;
    }
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

static void pack12(const uint16_t *restrict numbers, size_t count, uint8_t *restrict out)
{
    for (size_t i = 0; i + 1 < count; i += 2, out += 3) {
        out[0] = (uint8_t)numbers[i];
        out[1] = (uint8_t)((numbers[i] >> 8 & 0x0F) | numbers[i + 1] << 4);
        out[2] = (uint8_t)(numbers[i + 1] >> 4);
    }
    if (count % 2) {
        out[0] = (uint8_t)numbers[count - 1];
        out[1] = numbers[count - 1] >> 8 & 0x0F;
    }
}

static int unpack12(const uint8_t *restrict data, size_t count, uint16_t *restrict out)
{
    for (size_t i = 0; i + 1 < count; i += 2, data += 3) {
        out[i] = (uint16_t)(data[0] | (data[1] & 0x0F) << 8);
        out[i + 1] = (uint16_t)(data[1] >> 4 | data[2] << 4);
    }
    if (count % 2 == 0)
        return 1;
    out[count - 1] = (uint16_t)(data[0] | (data[1] & 0x0F) << 8);
    return data[1] >> 4 == 0;
}

static void pack2(const uint8_t *restrict numbers, size_t count, uint8_t *restrict out)
{
    size_t whole = count / 4;
    for (size_t i = 0; i < whole; i++) {
        uint32_t four;
        memcpy(&four, numbers + 4 * i, sizeof four);
        out[i] = (uint8_t)((four & 0x03) | (four >> 6 & 0x0C) | (four >> 12 & 0x30) |
                           (four >> 18 & 0xC0));
    }
    if (count % 4) {
        uint8_t last = 0;
        for (size_t i = 4 * whole; i < count; i++)
            last |= (uint8_t)((numbers[i] & 3) << 2 * (i % 4));
        out[whole] = last;
    }
}

static int unpack2(const uint8_t *restrict data, size_t count, uint8_t *restrict out)
{
    size_t whole = count / 4;
    for (size_t i = 0; i < whole; i++) {
        uint32_t byte = data[i];
        uint32_t four = (byte & 0x03) | (byte & 0x0C) << 6 | (byte & 0x30) << 12 | (byte & 0xC0) << 18;
        memcpy(out + 4 * i, &four, sizeof four);
    }
    for (size_t i = 4 * whole; i < count; i++)
        out[i] = data[whole] >> 2 * (i % 4) & 3;
    return count % 4 == 0 || data[whole] >> 2 * (count % 4) == 0;
}
