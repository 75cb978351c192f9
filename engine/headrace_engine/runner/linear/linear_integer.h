/* Products of grouped weights by integers. Each row is rounded to int8 with a scale for each group. The sums of a group are exact
 * integers. The sums over groups are in float32, in the order of `in`, by the same operations on every processor. So the bits of a
 * result depend neither on the number of rows and threads nor on the instructions.
 *
 * The scheme is that of llama.cpp's Q8_0 activations. Rows are stored in tiles, [tiles][groups][rows of the tile].
 */
typedef struct {
    int8_t x[GROUP];
    float scale, sum; /* sum: of x */
    int32_t halves[2];
} quantised_group;

#ifdef __AVX512F__
#define INTEGER_TILE 8
#else
#define INTEGER_TILE 4
#endif
#define BLOCK_ROWS 64 /* rows that are multiplied with one panel before the next */
#define STRIP_AHEAD 2048 /* bytes between the prefetch of weights and their use */

static inline int64_t quantised_floats(const linear_args *a) {
    return a->in_features / GROUP * (int64_t)(sizeof(quantised_group) / sizeof(float));
}

#if HAS_GROUPED
/* Rounds a group. Its scale is the largest magnitude / 127. NaN and infinity give a scale of NaN. */
static inline void quantise_group(const linear_args *a, int64_t from, int k, float norm, quantised_group *g) {
    f32x x[GROUP / LANES];
    i32x largest = {0}, rounded[GROUP / LANES];
    for (int i = 0; i < GROUP / LANES; i++) {
        x[i] = a->dtype == FLOAT32 ? load_inputs(a, from, k + i * LANES, norm, FLOAT32)
                                   : load_inputs(a, from, k + i * LANES, norm, BFLOAT16);
        i32x bits = (i32x)x[i] & 0x7fffffff; /* ordered like magnitudes, NaN above all */
        largest = (bits & (bits > largest)) | (largest & ~(bits > largest));
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    float magnitude;
    memcpy(&magnitude, &most, sizeof magnitude);
    int is_finite = most < 0x7f800000, is_zero = magnitude < 1e-30f; /* below, 127 / magnitude may overflow */
    float inverse = is_finite && !is_zero ? 127.0f / magnitude : 0.0f;
    g->scale = !is_finite ? NAN : is_zero ? 0.0f : magnitude / 127.0f;
    int32_t values[GROUP];
    for (int i = 0; i < GROUP / LANES; i++) {
        f32x scaled = is_finite ? x[i] * inverse : (f32x){0};
#ifdef __AVX512F__
        rounded[i] = (i32x)_mm512_cvtps_epi32((__m512)scaled);
#else
        rounded[i] = (i32x)_mm256_cvtps_epi32((__m256)scaled);
#endif
        memcpy(values + i * LANES, &rounded[i], sizeof rounded[i]);
    }
    g->halves[0] = g->halves[1] = 0;
    for (int i = 0; i < GROUP / 2; i++) g->halves[0] += values[i], g->halves[1] += values[GROUP / 2 + i];
    for (int i = 0; i < GROUP; i++) g->x[i] = (int8_t)values[i];
    g->sum = (float)(g->halves[0] + g->halves[1]);
}

/* Rows of a tile in memory: a power of two. The rows after the last one are zeros. */
static inline int stored_rows(int64_t left) { return left > 4 ? INTEGER_TILE : left > 2 ? 4 : (int)left; }

static void quantise_tile(const linear_args *a, float *packed, int64_t tile) {
    int64_t first = tile * INTEGER_TILE, left = a->rows - first;
    int rows = stored_rows(left), groups = a->in_features / GROUP;
    quantised_group *target = (quantised_group *)(packed + first * quantised_floats(a));
    for (int i = 0; i < rows; i++) {
        int64_t from = (first + i) * a->x_stride;
        float norm = i < left && a->norm_weight ? norm_scale(a, from) : 1.0f;
        for (int g = 0; g < groups; g++)
            if (i < left) quantise_group(a, from, g * GROUP, norm, target + (int64_t)g * rows + i);
            else memset(target + (int64_t)g * rows + i, 0, sizeof *target);
    }
}

/* Returns sum + the products of the four bytes in each dword. `codes` are unsigned, of `bits` bits. */
ALWAYS_INLINE i32x add_dot(i32x sum, u32x codes, u32x x, int bits) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    (void)bits;
    return (i32x)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    (void)bits;
    return (i32x)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else /* pairs of products are added in 16 bits: 8 bits would overflow, so they are halved to two times 4 */
#ifdef __AVX512F__
#define ADD_PAIRS(SUM, CODES, TIMES)                                                                        \
    (SUM + (i32x)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(CODES), (__m512i)x), _mm512_set1_epi16(TIMES)))
#else
#define ADD_PAIRS(SUM, CODES, TIMES)                                                                        \
    (SUM + (i32x)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(CODES), (__m256i)x), _mm256_set1_epi16(TIMES)))
#endif
    if (bits < 8) return ADD_PAIRS(sum, codes, 1);
    sum = ADD_PAIRS(sum, codes & 0x0f0f0f0f, 1);
    return ADD_PAIRS(sum, (codes >> 4) & 0x0f0f0f0f, 16);
#endif
}

ALWAYS_INLINE u32x broadcast_quad(const quantised_group *g, int quad) {
    uint32_t four;
    memcpy(&four, g->x + 4 * quad, 4);
    return four - (u32x){0};
}

/* Adds the products of a group to the sums of one row. */
ALWAYS_INLINE f32x add_group(const block_format f, f32x sum, const u32x *quads, const group_scales *s, const quantised_group *g) {
    i32x first = -f.offset * g->halves[0] - (i32x){0}, second = -f.offset * g->halves[1] - (i32x){0};
#pragma GCC unroll 4
    for (int quad = 0; quad < QUADS / 2; quad++) {
        first = add_dot(first, quads[quad], broadcast_quad(g, quad), f.bits);
        second = add_dot(second, quads[quad + QUADS / 2], broadcast_quad(g, quad + QUADS / 2), f.bits);
    }
    f32x scale = broadcast(g->scale);
    if (f.scales == K_HALVES) { /* the sum of both halves is an integer below 2^24: exact */
        f32x whole = multiply_add(s->scale[1], __builtin_convertvector(second, f32x),
                                  s->scale[0] * __builtin_convertvector(first, f32x));
        return multiply_add(s->d * scale, whole, sum);
    }
    f32x whole = __builtin_convertvector(first + second, f32x);
    if (f.scales == PLAIN) return multiply_add(s->scale[0] * scale, whole, sum);
    return multiply_add(scale, multiply_add(s->scale[0], whole, s->added * g->sum), sum);
}

/* Computes sums[ROWS][PANEL] of a tile and a strip. */
ALWAYS_INLINE void multiply_strip(const block_format f, const uint8_t *strip, const quantised_group *tile, int groups, float *sums,
                                  int ROWS) {
    f32x sum[INTEGER_TILE][PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < PARTS; part++) sum[i][part] = (f32x){0};
    const uint8_t *head = strip;
    for (int first = 0; first < groups; first += f.groups, head = strip) {
        strip += head_bytes(f);
        for (int group = 0; group < f.groups; group++, strip += group_bytes(f), tile += ROWS) {
            for (int at = 0; at < group_bytes(f); at += LINE) __builtin_prefetch(strip + STRIP_AHEAD + at, 0, 3);
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                u32x quads[QUADS];
#pragma GCC unroll 8
                for (int quad = 0; quad < QUADS; quad++) quads[quad] = load_quad(f, strip, part, quad);
                group_scales s = load_scales(f, head, strip + code_bytes(f), part);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) sum[i][part] = add_group(f, sum[i][part], quads, &s, tile + i);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < PARTS; part++) *(f32x *)(sums + i * PANEL + part * LANES) = sum[i][part];
}

#define MULTIPLY_STRIP(F)                                                                                                  \
    static __attribute__((noinline)) void multiply_strip_##F(const uint8_t *strip, const quantised_group *tile, int groups, \
                                                             float *sums, int rows) {                                      \
        if (rows == 1) multiply_strip(formats[F], strip, tile, groups, sums, 1);                                           \
        else if (rows == 2) multiply_strip(formats[F], strip, tile, groups, sums, 2);                                      \
        else if (rows == 4) multiply_strip(formats[F], strip, tile, groups, sums, 4);                                      \
        else multiply_strip(formats[F], strip, tile, groups, sums, INTEGER_TILE);                                          \
    }
EACH_FORMAT(MULTIPLY_STRIP)

/* Computes sums[rows][PANEL] of the rows first..last and a panel of a segment. */
static void multiply_panel_by_integers(const linear_args *a, const float *packed, int64_t first, int64_t last,
                                       const weight_segment *segment, int panel, float *sums) {
    int groups = a->in_features / GROUP;
    int64_t bytes = strip_bytes(formats[segment->format], a->in_features);
    for (int i = 0; i < PANEL / COLUMNS; i++) {
        int64_t index = (int64_t)panel * (PANEL / COLUMNS) + i;
        if (index * COLUMNS >= segment->out_features) return;
        const uint8_t *strip = (const uint8_t *)segment->strips + index * bytes;
        for (int64_t row = first; row < last; row += INTEGER_TILE) {
            const quantised_group *tile = (const quantised_group *)(packed + row * quantised_floats(a));
            float *target = sums + (row - first) * PANEL + i * COLUMNS;
#define MULTIPLY_BY(F) case F: multiply_strip_##F(strip, tile, groups, target, stored_rows(a->rows - row)); break;
            switch (segment->format) { EACH_FORMAT(MULTIPLY_BY) }
        }
    }
}

/* Multiplies all rows with the panels begin..end, or as many pairs of panels. */
static void multiply_by_integers(const linear_args *a, const float *packed, int begin, int end) {
    float sums[2][(BLOCK_ROWS + INTEGER_TILE) * PANEL] __attribute__((aligned(64)));
    for (int64_t first = 0; first < a->rows; first += BLOCK_ROWS) {
        int64_t last = first + BLOCK_ROWS < a->rows ? first + BLOCK_ROWS : a->rows;
        for (int index = begin; index < end; index++) {
            panel_place p = place_of(a, index);
            for (int half = 0; half <= (a->result == SILU_MUL); half++)
                multiply_panel_by_integers(a, packed, first, last, p.segment + half, p.panel, sums[half]);
            finish_tile(a, first, last - first, p, sums[0], a->result == SILU_MUL ? sums[1] : NULL);
        }
    }
}
#else
static void quantise_tile(const linear_args *a, float *packed, int64_t tile) { (void)a, (void)packed, (void)tile; }
static void multiply_by_integers(const linear_args *a, const float *packed, int begin, int end) {
    (void)a, (void)packed, (void)begin, (void)end;
}
#endif
