/* Products of grouped weights by integers. Each row is rounded to int8 with a scale for each group. With input_bytes = 2, what this
 * leaves is rounded to a second row of int8, whose product is added: an error of 2^-8 of the largest input becomes one of 2^-16.
 * The sums of a group are exact integers. The sums over groups are in float32, in the order of `in`, by the same operations on every processor. So the bits of a
 * result depend neither on the number of rows and threads nor on the instructions.
 *
 * The scheme is that of llama.cpp's Q8_0 activations. Rows are stored in tiles, [tiles][groups][rows of the tile].
 */
typedef struct {
    int8_t x[GROUP];
    float scale, sum, halves[2]; /* sum: of x; halves: the sums of its halves */
} quantised_group;

#ifdef __AVX512F__
#define INTEGER_TILE 8
#else
#define INTEGER_TILE 4
#endif
#define BLOCK_ROWS 64 /* rows that are multiplied with one panel before the next */

/* Floats of a row of int8. */
static inline int64_t rounded_floats(const linear_args *a) {
    return a->in_features / GROUP * (int64_t)(sizeof(quantised_group) / sizeof(float));
}

/* Floats of a row of inputs. */
static inline int64_t quantised_floats(const linear_args *a) { return rounded_rows(a) * rounded_floats(a); }

#if HAS_GROUPED
/* Rounds a group. Its scale is the largest magnitude / 127. NaN and infinity give a scale of NaN. */
static inline void quantise_group(const f32x *x, quantised_group *g) {
    i32x largest = {0};
#ifndef __AVX512F__
    __m256i rounded[GROUP / LANES];
#endif
    for (int i = 0; i < GROUP / LANES; i++) {
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
    for (int i = 0; i < GROUP / LANES; i++) {
        f32x scaled = is_finite ? x[i] * inverse : (f32x){0};
#ifdef __AVX512F__
        _mm_storeu_si128((__m128i *)(g->x + i * LANES), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)scaled)));
#else
        rounded[i] = _mm256_cvtps_epi32((__m256)scaled);
#endif
    }
#ifndef __AVX512F__
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* packs mixes the halves of vectors */
    _mm256_storeu_si256((__m256i *)g->x, bytes);
#endif
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)g->x));
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    fours = _mm256_hadd_epi32(fours, fours);
    int32_t halves[2] = {_mm256_extract_epi32(fours, 0) + _mm256_extract_epi32(fours, 1),
                         _mm256_extract_epi32(fours, 4) + _mm256_extract_epi32(fours, 5)};
    g->halves[0] = (float)halves[0], g->halves[1] = (float)halves[1], g->sum = (float)(halves[0] + halves[1]);
}

/* Subtracts a rounded group from its inputs. */
static inline void subtract_group(f32x *x, const quantised_group *g) {
    for (int i = 0; i < GROUP / LANES; i++) {
        f32x rounded;
        for (int j = 0; j < LANES; j++) rounded[j] = g->x[i * LANES + j];
        x[i] = multiply_add(broadcast(-g->scale), rounded, x[i]);
    }
}

/* Rows of a tile in memory: a power of two. The rows after the last one are zeros. */
static inline int stored_rows(int64_t left) { return left > 4 ? INTEGER_TILE : left > 2 ? 4 : (int)left; }

static void quantise_tile(const linear_args *a, float *packed, int64_t tile) {
    int each = rounded_rows(a), groups = a->in_features / GROUP;
    int64_t first = tile * INTEGER_TILE, left = a->rows * each - first;
    int rows = stored_rows(left);
    quantised_group *target = (quantised_group *)(packed + first * rounded_floats(a));
    for (int i = 0; i < rows; i += each) {
        int64_t from = (first + i) / each * a->x_stride;
        float norm = i < left && a->norm_weight ? norm_scale(a, from) : 1.0f;
        for (int g = 0; g < groups; g++) {
            quantised_group *own = target + (int64_t)g * rows + i;
            f32x x[GROUP / LANES];
            if (i >= left) {
                memset(own, 0, each * sizeof *own);
                continue;
            }
            for (int part = 0, k = g * GROUP; part < GROUP / LANES; part++, k += LANES)
                x[part] = a->dtype == FLOAT32 ? load_inputs(a, from, k, norm, FLOAT32) : load_inputs(a, from, k, norm, BFLOAT16);
            quantise_group(x, own);
            if (each == 1) continue;
            subtract_group(x, own);
            quantise_group(x, own + 1);
        }
    }
}

#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define HAS_DOT_OF_BYTES 1
#else
#define HAS_DOT_OF_BYTES 0
#endif

/* Bits of a code as it is multiplied. */
ALWAYS_INLINE int product_bits(const block_format f) { return f.has_levels ? 8 : f.bits; }

/* Quads that are multiplied at once. Without a dot product of bytes, pairs of products are added in 16 bits: two products of a code
 * below 2^bits and an input of at most 127, for each quad. For 4 bits there is room for a group, for 5 and 6 bits for two quads. 8
 * bits are made signed first: of at most 128. */
ALWAYS_INLINE int quads_at_once(const block_format f) {
    if (HAS_DOT_OF_BYTES) return f.scales == K_HALVES ? QUADS / 2 : QUADS;
    return product_bits(f) == 8 ? 1 : 2;
}

/* Returns codes as they are multiplied. */
ALWAYS_INLINE u32x multiplied_codes(const block_format f, u32x codes) {
    if (f.has_levels) return levels_of(codes, HAS_DOT_OF_BYTES ? 0 : 0x80);
    return !HAS_DOT_OF_BYTES && product_bits(f) == 8 ? codes ^ 0x80808080 : codes;
}

/* Returns what is subtracted from the codes after they are multiplied, besides the zero point of a group. */
ALWAYS_INLINE int offset_of_products(const block_format f) { return f.offset - (!HAS_DOT_OF_BYTES && product_bits(f) == 8 ? 128 : 0); }

ALWAYS_INLINE u32x broadcast_quad(const quantised_group *g, int quad) {
    uint32_t four;
    memcpy(&four, g->x + 4 * quad, 4);
    return four - (u32x){0};
}

/* Returns sum + the products of `quads`, the first of which is quad `first` of the group. */
ALWAYS_INLINE i32x add_products(const block_format f, i32x sum, const u32x *quads, int first, const quantised_group *g) {
#if HAS_DOT_OF_BYTES
#ifdef __AVX512F__
#define ADD_DOT(SUM, CODES, X) (i32x)_mm512_dpbusd_epi32((__m512i)(SUM), (__m512i)(CODES), (__m512i)(X))
#else
#define ADD_DOT(SUM, CODES, X) (i32x)_mm256_dpbusd_avx_epi32((__m256i)(SUM), (__m256i)(CODES), (__m256i)(X))
#endif
    i32x other = {0}; /* two chains of dependent instructions */
#pragma GCC unroll 8
    for (int i = 0; i < quads_at_once(f); i += 2) {
        sum = ADD_DOT(sum, quads[i], broadcast_quad(g, first + i));
        other = ADD_DOT(other, quads[i + 1], broadcast_quad(g, first + i + 1));
    }
    return sum + other;
#else
#ifdef __AVX512F__
#define VECTOR __m512i
#define NAME(OPERATION) _mm512_##OPERATION
#define NEGATE(X, SIGNS) _mm512_mask_sub_epi8(X, _mm512_movepi8_mask(SIGNS), _mm512_setzero_si512(), X)
#else
#define VECTOR __m256i
#define NAME(OPERATION) _mm256_##OPERATION
#define NEGATE(X, SIGNS) _mm256_sign_epi8(X, SIGNS)
#endif
    VECTOR pairs = product_bits(f) == 4 ? (VECTOR)sum : (VECTOR){0};
#pragma GCC unroll 8
    for (int i = 0; i < quads_at_once(f); i++) {
        VECTOR codes = (VECTOR)quads[i], x = (VECTOR)broadcast_quad(g, first + i);
        if (product_bits(f) == 8) x = NEGATE(x, codes), codes = NAME(abs_epi8)(codes);
        VECTOR products = NAME(maddubs_epi16)(codes, x);
        pairs = i || product_bits(f) == 4 ? NAME(add_epi16)(pairs, products) : products;
    }
    sum = product_bits(f) == 4 ? (i32x)pairs : sum + (i32x)NAME(madd_epi16)(pairs, NAME(set1_epi16)(1));
    __asm__("" : "+v"(sum)); /* else GCC stores all products before it adds them */
    return sum;
#endif
}

/* Returns the sum of (code - offset) x. It is an integer below 2^24, so nothing is rounded. */
ALWAYS_INLINE f32x without_offset(const block_format f, i32x products, const group_scales *s, float sum_of_x) {
#if !HAS_DOT_OF_BYTES
    if (product_bits(f) == 4) products = (i32x)NAME(madd_epi16)((VECTOR)products, NAME(set1_epi16)(1));
#endif
    f32x exact = __builtin_convertvector(products, f32x);
    if (f.scales == ZEROS)
        return multiply_add(__builtin_convertvector(-offset_of_products(f) - s->zero, f32x), broadcast(sum_of_x), exact);
    return offset_of_products(f) ? multiply_add(broadcast(-offset_of_products(f)), broadcast(sum_of_x), exact) : exact;
}

/* Adds a group to the sum of one row. `products`: of each half with K_HALVES, else [0] is of the group. */
ALWAYS_INLINE f32x add_group(const block_format f, f32x sum, const i32x *products, const group_scales *s, const quantised_group *g) {
    f32x scale = broadcast(g->scale);
    if (f.scales == K_HALVES) { /* the sum of both halves is an integer below 2^24, too */
        f32x first = without_offset(f, products[0], s, g->halves[0]);
        f32x second = without_offset(f, products[1], s, g->halves[1]);
        return multiply_add(s->d * scale, multiply_add(s->scale[1], second, s->scale[0] * first), sum);
    }
    f32x whole = without_offset(f, products[0], s, g->sum);
    if (adds(f)) return multiply_add(scale, multiply_add(s->scale[0], whole, s->added * g->sum), sum);
    return multiply_add(s->scale[0] * scale, whole, sum);
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
            i32x products[INTEGER_TILE][PARTS][2] = {0};
#pragma GCC unroll 8
            for (int from = 0; from < QUADS; from += quads_at_once(f)) {
                int half = f.scales == K_HALVES && from >= QUADS / 2;
                u32x quads[PARTS][QUADS];
#pragma GCC unroll 8
                for (int i = 0; i < quads_at_once(f); i++)
#pragma GCC unroll 2
                    for (int part = 0; part < PARTS; part++) quads[part][i] = multiplied_codes(f, load_quad(f, strip, part, from + i));
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
                    for (int part = 0; part < PARTS; part++)
                        products[i][part][half] = add_products(f, products[i][part][half], quads[part], from, tile + i);
            }
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                group_scales s = load_scales(f, head, strip + code_bytes(f), part);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) sum[i][part] = add_group(f, sum[i][part], products[i][part], &s, tile + i);
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

/* Computes sums[rows][PANEL] of the rows of int8 first..last and a panel of a segment. */
static void multiply_panel_by_integers(const linear_args *a, const float *packed, int64_t first, int64_t last,
                                       const weight_segment *segment, int panel, float *sums) {
    int groups = a->in_features / GROUP;
    int64_t bytes = strip_bytes(formats[segment->format], a->in_features);
    for (int i = 0; i < PANEL / COLUMNS; i++) {
        int64_t index = (int64_t)panel * (PANEL / COLUMNS) + i;
        if (index * COLUMNS >= segment->out_features) return;
        const uint8_t *strip = (const uint8_t *)segment->strips + index * bytes;
        for (int64_t row = first; row < last; row += INTEGER_TILE) {
            const quantised_group *tile = (const quantised_group *)(packed + row * rounded_floats(a));
            float *target = sums + (row - first) * PANEL + i * COLUMNS;
#define MULTIPLY_BY(F) case F: multiply_strip_##F(strip, tile, groups, target, stored_rows(a->rows * rounded_rows(a) - row)); break;
            switch (segment->format) { EACH_FORMAT(MULTIPLY_BY) }
        }
    }
}

/* Adds the sums of each two rows of int8 to those of a row of inputs. */
static void add_pairs(float *sums, int64_t rows) {
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += LANES)
            *(f32x *)(sums + i * PANEL + j) = *(f32x *)(sums + 2 * i * PANEL + j) + *(f32x *)(sums + (2 * i + 1) * PANEL + j);
}

/* Multiplies all rows with the panels begin..end, or as many pairs of panels. */
static void multiply_by_integers(const linear_args *a, const float *packed, int begin, int end) {
    float sums[2][(BLOCK_ROWS + INTEGER_TILE) * PANEL] __attribute__((aligned(64)));
    int each = rounded_rows(a);
    int64_t rows = a->rows * each;
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int64_t last = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
        for (int index = begin; index < end; index++) {
            panel_place p = place_of(a, index);
            for (int half = 0; half <= (a->result == ACT_AND_MUL); half++) {
                multiply_panel_by_integers(a, packed, first, last, p.segment + half, p.panel, sums[half]);
                if (each == 2) add_pairs(sums[half], (last - first) / 2);
            }
            finish_tile(a, first / each, (last - first) / each, p, sums[0], a->result == ACT_AND_MUL ? sums[1] : NULL);
        }
    }
}
#else
static void quantise_tile(const linear_args *a, float *packed, int64_t tile) { (void)a, (void)packed, (void)tile; }
static void multiply_by_integers(const linear_args *a, const float *packed, int begin, int end) {
    (void)a, (void)packed, (void)begin, (void)end;
}
#endif
