/* Vectors of grouped weights (grouped_weights.h): their scales and codes, and panels that are unpacked for the products of dense
 * weights. */
#if (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))) && defined(__F16C__) && defined(__FMA__)
#define HAS_GROUPED 1
#else
#define HAS_GROUPED 0
#endif
#if HAS_GROUPED
_Static_assert(PANEL % COLUMNS == 0, "a panel is whole strips");
#endif

/* Where a panel of a product is. */
typedef struct {
    const weight_segment *segment; /* NULL: dense weights */
    int panel;                     /* of the segment */
    int column, width;             /* of out */
} panel_place;

static inline int panels_in(int out) { return (out + PANEL - 1) / PANEL; }

/* Returns the place of a panel. Segments follow each other in out. The two of a gated product have the same columns. */
static inline panel_place place_of(const linear_args *a, int index) {
    int width = a->result == ACT_AND_MUL ? a->out_features / 2 : a->out_features, column = 0;
    panel_place p = {.segment = a->segments, .panel = index};
    if (a->segments && a->result != ACT_AND_MUL) {
        for (; p.panel >= panels_in(p.segment->out_features); p.segment++)
            p.panel -= panels_in(p.segment->out_features), column += p.segment->out_features;
        width = p.segment->out_features;
    }
    p.column = column + p.panel * PANEL, p.width = width - p.panel * PANEL < PANEL ? width - p.panel * PANEL : PANEL;
    return p;
}

#if HAS_GROUPED
#define PARTS (COLUMNS / LANES) /* vectors of a strip */
#define WIDE_STEPS 64           /* inputs of a panel that are unpacked at once in float32 */
#define STRIP_AHEAD 2048        /* bytes between the prefetch of weights and their use */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE f32x multiply_add(f32x a, f32x b, f32x c) {
#ifdef __AVX512F__
    return (f32x)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (f32x)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

ALWAYS_INLINE f32x load_halves(const uint8_t *at) {
#ifdef __AVX512F__
    return (f32x)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#else
    return (f32x)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#endif
}

ALWAYS_INLINE f32x load_bytes(const uint8_t *at, int is_signed) {
#ifdef __AVX512F__
    __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return (f32x)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
    return (f32x)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#endif
}

ALWAYS_INLINE i32x load_zeros(const uint8_t *at) {
#ifdef __AVX512F__
    return (i32x)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)at));
#else
    return (i32x)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)at));
#endif
}

/* The scales of a group for one vector of outputs. scale[1] is that of the second half with K_HALVES, whose d is separate. */
typedef struct {
    f32x scale[2], added, d;
    i32x zero; /* with ZEROS */
} group_scales;

ALWAYS_INLINE group_scales load_scales(const block_format f, const uint8_t *head, const uint8_t *scales, int part) {
    group_scales s = {.added = {0}};
    int at = part * LANES;
    if (f.scales == K_HALVES) {
        s.d = load_halves(head + 2 * at);
        s.scale[0] = load_bytes(scales + at, 1), s.scale[1] = load_bytes(scales + COLUMNS + at, 1);
    } else if (f.scales == K_SCALES) {
        s.scale[0] = load_halves(head + 2 * at) * load_bytes(scales + at, 1);
    } else if (f.scales == ZEROS) {
        s.scale[0] = *(const f32x *)(head + 4 * at), s.zero = load_zeros(head + 64 + 2 * at);
    } else if (f.scales == K_MINIMUM) {
        s.scale[0] = load_halves(head + 2 * at) * load_bytes(scales + at, 0);
        s.added = -(load_halves(head + 32 + 2 * at) * load_bytes(scales + COLUMNS + at, 0));
    } else {
        s.scale[0] = load_halves(scales + 2 * at);
        if (f.scales == MINIMUM) s.added = load_halves(scales + 32 + 2 * at);
    }
    return s;
}

/* Returns levels[i] ^ flip for each byte i, which is below 16. */
ALWAYS_INLINE u32x levels_of(u32x indexes, uint8_t flip) {
    __m128i table = _mm_xor_si128(_mm_loadu_si128((const __m128i *)levels), _mm_set1_epi8((char)flip));
#ifdef __AVX512F__
    return (u32x)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)indexes);
#else
    return (u32x)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)indexes);
#endif
}

/* Returns a quad of one vector of outputs, of indexes if there are levels; see quad_of. */
ALWAYS_INLINE u32x load_quad(const block_format f, const uint8_t *codes, int part, int quad) {
    const uint32_t *words = (const uint32_t *)codes + part * LANES;
    if (f.bits == 8) return *(const u32x *)(words + quad * COLUMNS);
    u32x low = (*(const u32x *)(words + quad / 2 * COLUMNS) >> 4 * (quad % 2)) & 0x0f0f0f0f;
    if (f.bits == 5) return low | ((*(const u32x *)(words + 4 * COLUMNS) >> quad) & 0x01010101) << 4;
    if (f.bits == 6) return low | ((*(const u32x *)(words + (4 + quad / 4) * COLUMNS) >> 2 * (quad % 4)) & 0x03030303) << 4;
    return low;
}

/* Codes as float32, with the offset of the format subtracted: an entry for each code of up to 5 bits. */
typedef struct {
    f32x values[2];
} code_table;

ALWAYS_INLINE code_table table_of(const block_format f) {
    code_table t = {0};
    for (int i = 0; i < 2 * LANES; i++)
        t.values[i / LANES][i % LANES] = (float)((f.has_levels ? levels[i % 16] : i) - (f.scales == ZEROS ? 0 : f.offset));
    return t;
}

/* Returns the values of byte `i` of a quad. Bits of `four` above a code of 4 or 5 bits may be set. */
ALWAYS_INLINE f32x values_of(const block_format f, const code_table *t, u32x four, int i) {
    u32x codes = four >> 8 * i;
#ifdef __AVX512F__
    if (f.bits == 4) return (f32x)_mm512_permutexvar_ps((__m512i)codes, (__m512)t->values[0]);
    if (f.bits == 5) return (f32x)_mm512_permutex2var_ps((__m512)t->values[0], (__m512i)codes, (__m512)t->values[1]);
#else
    (void)t;
    if (f.has_levels) codes = levels_of(codes & 255, 0);
#endif
    return __builtin_convertvector((i32x)(codes & 255) - (f.scales == ZEROS ? 0 : f.offset), f32x);
}

/* Stores pairs of bfloat16: out[LANES][2]. */
ALWAYS_INLINE void store_pairs(float *out, f32x first, f32x second) {
#if HAS_PAIRS
    static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_loadu_si512(order), halves));
#else
    (void)out, (void)first, (void)second; /* only matrix tiles read pairs */
#endif
}

/* Unpacks groups of one strip to target[input][PANEL] in float32, or to target[pair][PANEL][2] in bfloat16. */
ALWAYS_INLINE void unpack_strip(const block_format f, const uint8_t *strip, int from, int groups, float *target, int pairs) {
    const code_table table = table_of(f);
    for (int group = from; group < from + groups; group++, target += (pairs ? GROUP / 2 : GROUP) * PANEL) {
        const uint8_t *codes = group_of(f, strip, group), *scales = codes + code_bytes(f), *head = head_of(f, strip, group);
        for (int i = 0; i < group_bytes(f); i += LINE) __builtin_prefetch(codes + STRIP_AHEAD + i);
        for (int part = 0; part < PARTS; part++) {
            group_scales s = load_scales(f, head, scales, part);
            f32x zero = f.scales == ZEROS ? __builtin_convertvector(s.zero, f32x) : (f32x){0};
            float *out = target + part * LANES;
#pragma GCC unroll 8
            for (int quad = 0; quad < QUADS; quad++) {
                u32x four = load_quad(f, codes, part, quad);
                f32x scale = f.scales == K_HALVES ? s.d * s.scale[quad / (QUADS / 2)] : s.scale[0], value[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    f32x code = values_of(f, &table, four, i);
                    if (f.scales == ZEROS) code -= zero;
                    value[i] = adds(f) ? scale * code + s.added : scale * code;
                    if (!pairs) *(f32x *)(out + (quad * 4 + i) * PANEL) = value[i];
                    else if (i % 2) store_pairs(out + (quad * 2 + i / 2) * PANEL, value[i - 1], value[i]);
                }
            }
        }
    }
}

#define EACH_FORMAT(DO)                                                                     \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)                 \
    DO(IQ4_NL) DO(IQ4_XS)                                                                   \
    DO(INT4_32) DO(INT4_128) DO(INT8_32) DO(INT8_128)

/* Unpacks `depth` inputs of a panel, from input `from`, both multiples of a group. Columns after the last output become zero. */
static __attribute__((noinline)) void
unpack_panel(const linear_args *a, panel_place p, int half, int from, int depth, float *wide, int pairs) {
    const weight_segment *segment = p.segment + half;
    const block_format f = formats[segment->format];
    int64_t bytes = strip_bytes(f, a->in_features);
    int rows = pairs ? depth / 2 : depth;
    for (int i = 0; i < PANEL / COLUMNS; i++, wide += COLUMNS) {
        int64_t index = (int64_t)p.panel * (PANEL / COLUMNS) + i;
        const uint8_t *strip = (const uint8_t *)segment->strips + index * bytes;
        if (index * COLUMNS >= segment->out_features) {
            for (int k = 0; k < rows; k++) memset(wide + k * PANEL, 0, COLUMNS * sizeof(float));
            continue;
        }
#define UNPACK(F)                                                                                \
    case F:                                                                                      \
        if (pairs) unpack_strip(formats[F], strip, from / GROUP, depth / GROUP, wide, 1);        \
        else unpack_strip(formats[F], strip, from / GROUP, depth / GROUP, wide, 0);              \
        break;
        switch (segment->format) { EACH_FORMAT(UNPACK) }
    }
}
#else
#define WIDE_STEPS 64
static void unpack_panel(const linear_args *a, panel_place p, int half, int from, int depth, float *wide, int pairs) {
    (void)a, (void)p, (void)half, (void)from, (void)depth, (void)wide, (void)pairs;
}
#endif
