/* Packs blocks into strips (grouped_weights.h): those of a GGUF file, or those that grouped_weight.py makes of integers. Formats:
 * ggml/src/ggml-common.h of llama.cpp; INT4 and INT8 are float32 d, int16 zero, and a byte for each code. */

/* One block of a row: up to 256 codes, and its scales as bits. */
typedef struct {
    uint8_t codes[256], scales[16], minimums[8];
    uint16_t d, m; /* float16 */
    float wide_d;  /* ZEROS */
    int16_t zero;
} file_block;

static inline uint16_t read_half(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }

static inline int has_finite_scales(const file_block *b) {
    uint32_t bits;
    memcpy(&bits, &b->wide_d, sizeof bits); /* the compiler may assume that numbers are finite */
    return (b->d & 0x7c00) != 0x7c00 && (b->m & 0x7c00) != 0x7c00 && (bits & 0x7f800000) != 0x7f800000;
}

/* Reads the 6-bit scales and minimums of Q4_K and Q5_K. */
static void read_scales(const uint8_t *s, file_block *b) {
    for (int j = 0; j < 4; j++) {
        b->scales[j] = s[j] & 63, b->minimums[j] = s[j + 4] & 63;
        b->scales[j + 4] = (s[j + 8] & 15) | s[j] >> 6 << 4, b->minimums[j + 4] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
}

/* Reads a block of 32 codes: d, perhaps m, perhaps the fifth bits, then nibbles or bytes. */
static void read_short_block(const block_format f, const uint8_t *at, file_block *b) {
    b->d = read_half(at), at += 2;
    if (f.scales == MINIMUM) b->m = read_half(at), at += 2;
    uint32_t fifth = 0;
    if (f.bits == 5) memcpy(&fifth, at, 4), at += 4;
    for (int j = 0; j < GROUP && f.bits == 8; j++) b->codes[j] = at[j] ^ 128; /* signed to code */
    for (int j = 0; j < 16 && f.bits < 8; j++) {
        b->codes[j] = (at[j] & 15) | (fifth >> j & 1) << 4;
        b->codes[j + 16] = at[j] >> 4 | (fifth >> (j + 16) & 1) << 4;
    }
}

static void read_q4_q5_k(const block_format f, const uint8_t *at, file_block *b) {
    const uint8_t *fifth = at + 16, *nibbles = at + (f.bits == 5 ? 48 : 16);
    b->d = read_half(at), b->m = read_half(at + 2);
    read_scales(at + 4, b);
    for (int group = 0; group < 8; group++)
        for (int j = 0; j < GROUP; j++) {
            int low = nibbles[group / 2 * GROUP + j] >> 4 * (group % 2) & 15;
            b->codes[group * GROUP + j] = low | (f.bits == 5 ? (fifth[j] >> group & 1) << 4 : 0);
        }
}

static void read_iq4_xs(const uint8_t *at, file_block *b) {
    int high = read_half(at + 2);
    b->d = read_half(at);
    for (int group = 0; group < 8; group++) {
        const uint8_t *nibbles = at + 8 + 16 * group;
        b->scales[group] = ((at[4 + group / 2] >> 4 * (group % 2) & 15) | (high >> 2 * group & 3) << 4) - 32; /* int8 */
        for (int j = 0; j < 16; j++)
            b->codes[group * GROUP + j] = nibbles[j] & 15, b->codes[group * GROUP + j + 16] = nibbles[j] >> 4;
    }
}

static void read_q6_k(const uint8_t *at, file_block *b) {
    const uint8_t *low = at, *high = at + 128;
    for (int group = 0; group < 8; group++) {
        int half = group / 4, quarter = group % 4; /* a half has 64 bytes of nibbles and 32 bytes of pairs */
        for (int j = 0; j < GROUP; j++)
            b->codes[group * GROUP + j] = (low[64 * half + 32 * (quarter % 2) + j] >> 4 * (quarter / 2) & 15) |
                                          (high[32 * half + j] >> 2 * quarter & 3) << 4;
    }
    memcpy(b->scales, at + 192, 16);
    b->d = read_half(at + 208);
}

static void read_integers(const block_format f, const uint8_t *at, file_block *b) {
    memcpy(&b->wide_d, at, 4);
    memcpy(&b->zero, at + 4, 2);
    memcpy(b->codes, at + 6, f.groups * GROUP);
}

static void read_block(const block_format f, const uint8_t *at, file_block *b) {
    if (f.scales == ZEROS) read_integers(f, at, b);
    else if (f.scales == K_HALVES) read_q6_k(at, b);
    else if (f.scales == K_SCALES) read_iq4_xs(at, b);
    else if (f.scales == K_MINIMUM) read_q4_q5_k(f, at, b);
    else read_short_block(f, at, b);
}

/* Places a block as one column of a block of a strip, whose bytes are zero. */
static void put_block(const block_format f, uint8_t *target, int column, const file_block *b) {
    if (f.scales == ZEROS) memcpy(target + 4 * column, &b->wide_d, 4), memcpy(target + 64 + 2 * column, &b->zero, 2);
    else if (head_bytes(f)) memcpy(target + 2 * column, &b->d, 2);
    if (f.scales == K_MINIMUM) memcpy(target + 32 + 2 * column, &b->m, 2);
    for (int group = 0; group < f.groups; group++) {
        uint8_t *codes = target + head_bytes(f) + group * group_bytes(f), *scales = codes + code_bytes(f);
        for (int quad = 0; quad < QUADS; quad++) {
            uint32_t four;
            memcpy(&four, b->codes + group * GROUP + quad * 4, 4);
            put_quad(f, codes, column, quad, four);
        }
        if (f.scales == K_MINIMUM) scales[column] = b->scales[group], scales[COLUMNS + column] = b->minimums[group];
        else if (f.scales == K_SCALES) scales[column] = b->scales[group];
        else if (f.scales == K_HALVES) scales[column] = b->scales[2 * group], scales[COLUMNS + column] = b->scales[2 * group + 1];
        else if (f.scales != ZEROS) memcpy(scales + 2 * column, &b->d, 2);
        if (f.scales == MINIMUM) memcpy(scales + 32 + 2 * column, &b->m, 2);
    }
}

/* Returns the bytes of a packed weight. */
int64_t headrace_grouped_bytes(int format, int in, int out) {
    return (out + COLUMNS - 1) / COLUMNS * strip_bytes(formats[format], in);
}

/* Packs rows of blocks, [out][in / inputs of a block]. `order`: NULL, or the row of the file for each output. The outputs after the
 * last one are zeros. Returns the first row of the file with a scale that is not finite, or -1. */
int64_t headrace_pack_blocks(int format, int threads, int in, int out, const uint8_t *rows, const int32_t *order, uint8_t *strips) {
    const block_format f = formats[format];
    int64_t bytes = strip_bytes(f, in), blocks = in / (GROUP * f.groups), bad = -1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
    for (int strip = 0; strip < (out + COLUMNS - 1) / COLUMNS; strip++) {
        uint8_t *target = strips + strip * bytes;
        memset(target, 0, bytes);
        for (int column = 0; column < COLUMNS && strip * COLUMNS + column < out; column++) {
            int64_t row = order ? order[strip * COLUMNS + column] : strip * COLUMNS + column;
            const uint8_t *from = rows + row * blocks * f.file_bytes;
            for (int64_t i = 0; i < blocks; i++) {
                file_block b = {.d = 0};
                read_block(f, from + i * f.file_bytes, &b);
                put_block(f, target + i * block_bytes(f), column, &b);
                if (!has_finite_scales(&b)) {
#pragma omp critical
                    bad = bad < 0 || row < bad ? row : bad;
                }
            }
        }
    }
    return bad;
}
