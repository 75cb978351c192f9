/* Weights in groups of few bits, as checkpoints store them, in a layout for vectors. Nothing is rounded: each weight is the value that
 * the file defines.
 *
 * A strip is COLUMNS outputs. It is an array of blocks, each with the inputs of one block of the file:
 *
 *   [head: the scales of the block]              float16 d[16], with K_MINIMUM also m[16]; ZEROS: float32 d[16], int16 zero[16]
 *   groups of 32 inputs: [codes][scales of the group]
 *
 * Four adjacent inputs form a quad. The codes of a group are vectors of 16 dwords, one for each output. A byte of a dword belongs to
 * one input of a quad. With 8 bits, vector i has quad i. With fewer, vector i has quad 2i in its low and quad 2i + 1 in its high
 * nibbles. The fifth bits of all quads share one more vector, and the upper pairs of bits for 6-bit codes two more: bit i, or pair
 * i % 4, of a byte belongs to quad i.
 *
 * The codes of IQ4_NL and IQ4_XS are indexes of 16 levels. They stay indexes in memory, and become codes of 8 bits when they are read.
 */
#include <stddef.h>

enum { GROUP = 32, COLUMNS = 16, QUADS = GROUP / 4 };
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, INT4_32, INT4_128, INT8_32, INT8_128, FORMATS }; /* as in grouped_weight.py */

/* The scales of a weight w of code q.
 *   PLAIN     w = d (q - offset)          float16 d of each group
 *   MINIMUM   w = d q + m                 float16 d and m of each group
 *   K_MINIMUM w = d scale q - m minimum   uint8 scale and minimum of each group
 *   K_SCALES  w = d scale (q - offset)    int8 scale of each group
 *   K_HALVES  w = d scale (q - offset)    int8 scale of each half of a group
 *   ZEROS     w = d (q - zero)            float32 d and int16 zero of each block */
enum { PLAIN, MINIMUM, K_MINIMUM, K_SCALES, K_HALVES, ZEROS };

typedef struct {
    int bits, offset, scales, groups; /* groups: of one block */
    int file_bytes;                   /* of a block in the file */
    int has_levels;
} block_format;

static const block_format formats[FORMATS] = {
    [Q4_0] = {4, 8, PLAIN, 1, 18},      [Q4_1] = {4, 0, MINIMUM, 1, 20},    [Q5_0] = {5, 16, PLAIN, 1, 22},
    [Q5_1] = {5, 0, MINIMUM, 1, 24},    [Q8_0] = {8, 128, PLAIN, 1, 34},    [Q4_K] = {4, 0, K_MINIMUM, 8, 144},
    [Q5_K] = {5, 0, K_MINIMUM, 8, 176}, [Q6_K] = {6, 32, K_HALVES, 8, 210},
    [IQ4_NL] = {4, 128, PLAIN, 1, 18, 1}, [IQ4_XS] = {4, 128, K_SCALES, 8, 136, 1},
    [INT4_32] = {4, 0, ZEROS, 1, 38},   [INT4_128] = {4, 0, ZEROS, 4, 134},
    [INT8_32] = {8, 0, ZEROS, 1, 38},   [INT8_128] = {8, 0, ZEROS, 4, 134},
};

/* The levels of IQ4_NL and IQ4_XS, plus 128. */
static const uint8_t levels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

static inline int head_bytes(const block_format f) {
    return f.scales == ZEROS ? 96 : f.scales == K_MINIMUM ? 64 : f.scales == K_HALVES || f.scales == K_SCALES ? 32 : 0;
}
static inline int adds(const block_format f) { return f.scales == MINIMUM || f.scales == K_MINIMUM; }
static inline int code_bytes(const block_format f) { return f.bits * (GROUP * COLUMNS / 8); }
static inline int group_bytes(const block_format f) {
    return code_bytes(f) + (f.scales == ZEROS ? 0 : f.scales == MINIMUM ? 64 : f.scales == K_SCALES ? 16 : 32);
}
static inline int64_t block_bytes(const block_format f) { return head_bytes(f) + (int64_t)f.groups * group_bytes(f); }
static inline int64_t strip_bytes(const block_format f, int in) { return in / (GROUP * f.groups) * block_bytes(f); }

/* Returns group `index` of a strip. */
static inline const uint8_t *group_of(const block_format f, const uint8_t *strip, int index) {
    return strip + index / f.groups * block_bytes(f) + head_bytes(f) + index % f.groups * (int64_t)group_bytes(f);
}

static inline const uint8_t *head_of(const block_format f, const uint8_t *strip, int index) {
    return strip + index / f.groups * block_bytes(f);
}

static inline float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff, bits;
    float value;
    if (!exponent) { /* zero or subnormal: a multiple of 2^-24 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0xff : exponent + 112) << 23 | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float half_at(const uint8_t *halves, int index) {
    uint16_t half;
    memcpy(&half, halves + 2 * index, sizeof half);
    return half_to_float(half);
}

/* What is subtracted from the code of one input, what multiplies it, and what is added. `half`: of the group. */
typedef struct {
    float scale, added;
    int zero;
} input_scale;

static inline input_scale scale_of(const block_format f, const uint8_t *head, const uint8_t *scales, int column, int half) {
    if (f.scales == K_MINIMUM)
        return (input_scale){half_at(head, column) * scales[column], -(half_at(head + 32, column) * scales[COLUMNS + column]), 0};
    if (f.scales == K_HALVES || f.scales == K_SCALES)
        return (input_scale){half_at(head, column) * ((const int8_t *)scales)[(f.scales == K_HALVES ? half : 0) * COLUMNS + column], 0, f.offset};
    if (f.scales == ZEROS) return (input_scale){((const float *)head)[column], 0, ((const int16_t *)(head + 64))[column]};
    return (input_scale){half_at(scales, column), f.scales == MINIMUM ? half_at(scales + 32, column) : 0, f.offset};
}

/* Returns the four codes of a quad of one output, one in each byte. */
static inline uint32_t quad_of(const block_format f, const uint8_t *codes, int column, int quad) {
    const uint32_t *words = (const uint32_t *)codes + column;
    if (f.bits == 8) return words[quad * COLUMNS];
    uint32_t low = words[quad / 2 * COLUMNS] >> 4 * (quad % 2) & 0x0f0f0f0f;
    if (f.bits == 5) return low | (words[4 * COLUMNS] >> quad & 0x01010101) << 4;
    if (f.bits == 6) return low | (words[(4 + quad / 4) * COLUMNS] >> 2 * (quad % 4) & 0x03030303) << 4;
    if (!f.has_levels) return low;
    return levels[low & 15] | levels[low >> 8 & 15] << 8 | levels[low >> 16 & 15] << 16 | (uint32_t)levels[low >> 24] << 24;
}

/* Places a quad, of indexes if there are levels. Its bits must be zero before. */
static inline void put_quad(const block_format f, uint8_t *codes, int column, int quad, uint32_t value) {
    uint32_t *words = (uint32_t *)codes + column;
    if (f.bits == 8) {
        words[quad * COLUMNS] = value;
        return;
    }
    words[quad / 2 * COLUMNS] |= (value & 0x0f0f0f0f) << 4 * (quad % 2);
    if (f.bits == 5) words[4 * COLUMNS] |= (value >> 4 & 0x01010101) << quad;
    if (f.bits == 6) words[(4 + quad / 4) * COLUMNS] |= (value >> 4 & 0x03030303) << 2 * (quad % 4);
}

/* Writes one output of a strip to out[in], in float32 or bfloat16. */
static void unpack_column(const block_format f, int in, const uint8_t *strip, int column, void *out, int dtype) {
    for (int group = 0; group < in / GROUP; group++) {
        const uint8_t *codes = group_of(f, strip, group), *scales = codes + code_bytes(f), *head = head_of(f, strip, group);
        for (int quad = 0; quad < QUADS; quad++) {
            input_scale s = scale_of(f, head, scales, column, quad / (QUADS / 2));
            uint32_t four = quad_of(f, codes, column, quad);
            for (int i = 0; i < 4; i++) {
                float value = s.scale * (float)((int)(four >> 8 * i & 255) - s.zero);
                store_scalar(out, group * GROUP + quad * 4 + i, adds(f) ? value + s.added : value, dtype);
            }
        }
    }
}

/* Writes the rows `ids` of a weight [out][in] to out[count][in]. */
void headrace_unpack_rows(int format, int dtype, int threads, int in, const void *strips, const int64_t *ids, int64_t count,
                          void *out) {
    const block_format f = formats[format];
#pragma omp parallel for num_threads(threads) if (count > 64)
    for (int64_t i = 0; i < count; i++)
        unpack_column(f, in, (const uint8_t *)strips + ids[i] / COLUMNS * strip_bytes(f, in), (int)(ids[i] % COLUMNS),
                      (char *)out + i * in * (dtype == FLOAT32 ? 4 : 2), dtype);
}
