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

ALWAYS_INLINE u32x rounded_bits(f32x value) {
    u32x bits = (u32x)value;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* weights are finite */
}

/* Unpacks groups of one strip to target[input][PANEL] in float32, or to target[pair][PANEL][2] in bfloat16. */
ALWAYS_INLINE void unpack_strip(const block_format f, const uint8_t *strip, int from, int groups, float *target, int pairs) {
    for (int group = from; group < from + groups; group++, target += (pairs ? GROUP / 2 : GROUP) * PANEL) {
        const uint8_t *codes = group_of(f, strip, group), *scales = codes + code_bytes(f), *head = head_of(f, strip, group);
        for (int part = 0; part < PARTS; part++) {
            group_scales s = load_scales(f, head, scales, part);
            i32x zero = f.scales == ZEROS ? s.zero : f.offset - (i32x){0};
            float *out = target + part * LANES;
#pragma GCC unroll 8
            for (int quad = 0; quad < QUADS; quad++) {
                u32x four = load_quad(f, codes, part, quad);
                if (f.has_levels) four = levels_of(four, 0);
                f32x scale = f.scales == K_HALVES ? s.d * s.scale[quad / (QUADS / 2)] : s.scale[0], value[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    f32x code = __builtin_convertvector((i32x)((four >> 8 * i) & 255) - zero, f32x);
                    value[i] = adds(f) ? scale * code + s.added : scale * code;
                    if (!pairs) *(f32x *)(out + (quad * 4 + i) * PANEL) = value[i];
                    else if (i % 2) *(u32x *)(out + (quad * 2 + i / 2) * PANEL) = rounded_bits(value[i - 1]) | rounded_bits(value[i]) << 16;
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
