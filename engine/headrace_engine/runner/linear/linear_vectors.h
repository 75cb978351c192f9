/* Products by vectors: a tile of at most TILE rows times a panel, with sums in registers. Rows are copied into tiles of float32,
 * [tiles][in][rows of the tile], or of pairs, [tiles][in / 2][rows][2]. */
#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE 6 /* 12 sums, 2 vectors of weights and 1 broadcast: 15 of 16 registers */
#else
#define TILE 8 /* 24 sums, 3 vectors of weights and 1 broadcast: 28 of 32 registers */
#endif
#define MAX_DEPTH 1024        /* steps of a panel, or of two, before the sums are stored: they stay in L2 */
#define PREFETCH_STEPS 16     /* steps between the prefetch of weights and their use */
#define WIDE_BYTES (24 << 10) /* weights that are widened at once, and stay in L1 */
/* Limits of a block: tiles that are multiplied with one panel, or two, before the next. They stay in L2. */
#define BLOCK_TILES (144 / TILE)
#define BLOCK_BYTES (512 << 10)

/* Floats of a row in one step: one input, one pair, or both inputs of a widened pair. */
static inline int floats_of_step(int kind) { return kind == WIDENED ? 2 : 1; }

static inline int64_t row_floats(const linear_args *a) {
    int kind = kind_of_weight(a->dtype);
    return (int64_t)num_steps(kind, a->in_features) * floats_of_step(kind);
}

/* Tiles of a block. A few rows form a single block of any size. */
static inline int64_t max_vector_tiles(int64_t row_floats, int64_t tiles) {
    int64_t fit = BLOCK_BYTES / ((int64_t)sizeof(float) * TILE * row_floats);
    return tiles <= BLOCK_TILES || fit > BLOCK_TILES ? BLOCK_TILES : fit < 1 ? 1 : fit;
}

/* What a tile prefetches: one cache line in each step, `stride` bytes after the previous one. After `lines` lines it continues
 * with the next of the upcoming pieces. */
typedef struct {
    const char *line;
    int64_t piece;
    const upcoming_blocks *upcoming;
    int stride, lines;
} prefetch_stream;

static inline void next_piece(prefetch_stream *r) {
    int kind = (int)(r->piece % 2);
    r->lines = INT32_MAX;
    if (r->piece >= 2 * r->upcoming->count) return; /* prefetches beyond the last piece are harmless */
    r->line = r->upcoming->base[kind] + r->upcoming->blocks[r->piece / 2] * r->upcoming->bytes[kind];
    r->lines = (int)(r->upcoming->bytes[kind] / LINE);
    r->piece++;
}

/* Computes sums[ROWS][PANEL] of one tile and a part of one panel. `begun`: add to the sums that are stored. */
static inline __attribute__((always_inline)) void
multiply_tile(const float *tile, const void *weight, int depth, float *sums, int begun, int ROWS, int kind, prefetch_stream ahead) {
    f32x sum[TILE][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) sum[i][j] = begun ? *(f32x *)(sums + i * PANEL + j * LANES) : (f32x){0};
    for (int k = 0; k < depth; k++) {
        __builtin_prefetch(ahead.line, 0, 2);
        ahead.line += ahead.stride;
        if (--ahead.lines == 0) next_piece(&ahead);
        /* The hardware prefetches from L2 too late. */
        const char *upcoming_weights = (const char *)weight + (int64_t)(k + PREFETCH_STEPS) * PANEL * step_bytes(kind);
        for (int at = 0; at < PANEL * step_bytes(kind); at += 64) __builtin_prefetch(upcoming_weights + at, 0, 3);
#pragma GCC unroll 2
        for (int second = 0; second < floats_of_step(kind); second++, tile += ROWS) {
            f32x w[VECTORS];
#pragma GCC unroll 16
            for (int j = 0; j < VECTORS; j++) w[j] = load_step(weight, (int64_t)k * PANEL + j * LANES, kind, second);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
                for (int j = 0; j < VECTORS; j++) sum[i][j] = add_product(sum[i][j], tile + i, w[j], kind);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) *(f32x *)(sums + i * PANEL + j * LANES) = sum[i][j];
}

#define CASE(ROWS, KIND)                                                                          \
    case ROWS:                                                                                    \
        if (ROWS <= TILE) multiply_tile(tile, weight, depth, sums, begun, ROWS, KIND, ahead);     \
        break;
#define MULTIPLY(NAME, KIND)                                                                                       \
    static void NAME(int rows, const float *tile, const void *weight, int depth, float *sums, int begun,           \
                     prefetch_stream ahead) {                                                                      \
        switch (rows) {                                                                                            \
            CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND)                                                \
            CASE(5, KIND) CASE(6, KIND) CASE(7, KIND) CASE(8, KIND)                                                \
        }                                                                                                          \
    }
MULTIPLY(multiply_float32, FLOAT32)
MULTIPLY(multiply_pairs, PAIRS)
MULTIPLY(multiply_widened, WIDENED)

/* Returns the first row of a tile. Rows are spread evenly over the tiles. */
static inline int64_t tile_begin(int64_t rows, int64_t tiles, int64_t tile) { return rows * tile / tiles; }

#ifdef __AVX512F__
/* Loads a vector of inputs, or of pairs, of the row that begins at `from`. */
static inline __attribute__((always_inline)) f32x
load_row(const linear_args *a, int64_t from, int at, float scale, int dtype, int pairs) {
    if (!pairs) return load_inputs(a, from, at, scale, dtype);
    uint16_t normed[2 * LANES];
    int converts = a->norm_weight || a->order;
    for (int half = 0; half < 2 * LANES && converts; half += LANES)
        store_vector(normed, half, load_inputs(a, from, 2 * at + half, scale, BFLOAT16), BFLOAT16);
    f32x found;
    memcpy(&found, converts ? normed : (const uint16_t *)a->x + from + 2 * at, sizeof found);
    return found;
}

/* Packs the part of a tile that fills whole vectors. Returns the number of inputs, or pairs, that are done. */
static inline __attribute__((always_inline)) int
pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int dtype, int pairs) {
    int at = 0, end = pairs ? a->in_features / 2 : a->in_features;
    for (; at + LANES <= end; at += LANES, target += LANES * rows) {
        f32x array[MAX_INTERLEAVED] = {0};
        for (int i = 0; i < rows; i++) array[i] = load_row(a, (begin + i) * a->x_stride, at, scales[i], dtype, pairs);
        interleave(target, array, rows);
    }
    return at;
}
#else
static int pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int dtype, int pairs) {
    (void)a, (void)target, (void)begin, (void)rows, (void)scales, (void)dtype, (void)pairs;
    return 0;
}
#endif

static void pack_tile(const linear_args *a, float *target, int64_t begin, int64_t end) {
    int rows = (int)(end - begin), pairs = kind_of(a->dtype) == PAIRS, dtype = a->dtype, done;
    float scales[TILE] = {0};
    for (int i = 0; i < rows && a->norm_weight; i++) scales[i] = norm_scale(a, (begin + i) * a->x_stride);
    if (pairs) done = 2 * pack_vectors(a, target, begin, rows, scales, BFLOAT16, 1);
    else if (dtype == BFLOAT16) done = pack_vectors(a, target, begin, rows, scales, BFLOAT16, 0);
    else if (rows == TILE) done = pack_vectors(a, target, begin, TILE, scales, FLOAT32, 0); /* constant rows: no loop */
    else done = pack_vectors(a, target, begin, rows, scales, FLOAT32, 0);
    if (a->in_features % 2 && dtype == BFLOAT16) /* the last pair has no second value */
        memset(target + (row_floats(a) - 1) * rows, 0, sizeof(float) * rows);
    for (int i = 0; i < rows; i++)
        for (int k = done; k < a->in_features; k++) {
            float x = load_input(a, (begin + i) * a->x_stride, k, scales[i]);
            if (pairs) store_scalar(target + k / 2 * rows + i, k % 2, x, BFLOAT16);
            else target[k * rows + i] = x;
        }
}

/* Widens a part of a panel to float32, once for several tiles. */
static void widen(float *wide, const void *weight, int depth) {
    for (int64_t k = 0; k < depth; k++)
        for (int second = 0; second < 2; second++, wide += PANEL)
            for (int j = 0; j < PANEL; j += LANES) *(f32x *)(wide + j) = load_step(weight, k * PANEL + j, WIDENED, second);
}

/* Plans the prefetches of one of the tiles that are multiplied with a part of a panel. All of them need the `size` bytes at
 * `next` afterwards, or nothing if it is NULL. Tiles that are not needed for these prefetch what attention reads next. */
static prefetch_stream plan_prefetch(const linear_args *a, const char *next, int64_t size, int depth, int64_t tile, int64_t tiles) {
    int64_t step = size / depth, needed = (step + LINE - 1) / LINE;
    prefetch_stream own = {.line = a->weight, .lines = INT32_MAX}; /* in the cache already: costs nothing */
    if (!next && (!a->upcoming || tiles <= needed)) return own;
    if (!a->upcoming || tiles <= needed)
        return (prefetch_stream){
            .line = next + size * tile / tiles, .stride = (int)((step + tiles - 1) / tiles), .lines = INT32_MAX};
    if (next && tile < needed) return (prefetch_stream){.line = next + size * tile / needed, .stride = LINE, .lines = INT32_MAX};
    /* If a piece has more lines than the tile has steps, the rest is skipped. */
    upcoming_blocks *u = a->upcoming;
    int64_t pieces = 2 * depth * LINE / (u->bytes[0] + u->bytes[1]), claimed;
#pragma omp atomic read
    claimed = u->claimed;
    if (claimed >= 2 * u->count) return own;
#pragma omp atomic capture
    {
        claimed = u->claimed;
        u->claimed += pieces ? pieces : 1;
    }
    own.upcoming = u, own.piece = claimed, own.stride = LINE;
    next_piece(&own);
    return own;
}

/* Prefetches the cache lines of a tile's results before its products. The number of lines is constant: a narrow last panel
 * prefetches some for nothing. */
static void prefetch_results(const linear_args *a, int64_t row, int64_t rows, int column) {
    int element = a->dtype == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < rows; i++)
        for (int at = 0; at < PANEL * element; at += LINE)
            __builtin_prefetch((const char *)a->out + ((row + i) * a->out_stride + column) * element + at, 1, 3);
}

/* Multiplies the rows of tiles first..last with one panel, or two if the result is gated. `behind` are the weights that are
 * multiplied next, or NULL. */
static void multiply_panel(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int index,
                           const char *behind) {
    float sums[2][BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
    float wide[WIDE_BYTES / 4] __attribute__((aligned(64)));
    int kind = kind_of_weight(a->dtype), bytes = PANEL * step_bytes(kind), steps = num_steps(kind, a->in_features);
    int halves = a->result == ACT_AND_MUL ? 2 : 1, unpacks = a->segments != NULL; /* then the type of the data is float32 */
    int widens = kind == WIDENED && last - first > 2; /* otherwise each tile widens while it waits for memory */
    int max_steps = unpacks ? WIDE_STEPS : widens ? WIDE_BYTES / (2 * bytes) / halves : MAX_DEPTH;
    int unit = unpacks ? GROUP : 1; /* steps of a chunk are a multiple of it */
    int chunks = (steps + max_steps - 1) / max_steps;
    panel_place p = place_of(a, index);
    int64_t first_row = tile_begin(a->rows, tiles, first);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (int)((int64_t)(steps / unit) * chunk / chunks) * unit;
        int depth = (int)((int64_t)(steps / unit) * (chunk + 1) / chunks) * unit - from;
        int64_t size = (int64_t)depth * bytes, to_other = panel_bytes(a);
        const char *weight = unpacks ? NULL : panel_of(a, index) + (int64_t)from * bytes;
        const char *next = unpacks ? NULL : chunk < chunks - 1 ? weight + size : behind;
        for (int half = 0; half < halves && unpacks; half++) unpack_panel(a, p, half, from, depth, wide + half * WIDE_BYTES / 8, 0);
        for (int half = 0; half < halves && widens; half++) widen(wide + half * WIDE_BYTES / 8, weight + half * to_other, depth);
        for (int64_t t = first; t < last; t++) {
            int64_t row = tile_begin(a->rows, tiles, t), rows = tile_begin(a->rows, tiles, t + 1) - row;
            const float *tile = tiled + (row - first_row) * row_floats(a) + from * rows * floats_of_step(kind);
            int64_t place = (row - first_row) * PANEL;
            if (chunk == chunks - 1) prefetch_results(a, row, rows, p.column);
            for (int half = 0; half < halves; half++) {
                const char *own = unpacks ? (const char *)(wide + half * WIDE_BYTES / 8) : weight + half * to_other, *later = next ? next + half * to_other : NULL;
                prefetch_stream ahead = plan_prefetch(a, later, size, widens ? 2 * depth : depth, t - first, last - first);
                if (kind == PAIRS) multiply_pairs((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
                else if (kind == FLOAT32) multiply_float32((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
                else if (widens)
                    multiply_float32((int)rows, tile, wide + half * WIDE_BYTES / 8, 2 * depth, sums[half] + place, chunk > 0, ahead);
                else multiply_widened((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
            }
            if (chunk == chunks - 1) finish_tile(a, row, rows, p, sums[0] + place, halves > 1 ? sums[1] + place : NULL);
        }
    }
}

/* Multiplies a block with the panels begin..end, or as many pairs of panels. */
static void multiply_block_by_vectors(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last,
                                      int begin, int end, const char *behind) {
    for (int index = begin; index < end; index++)
        multiply_panel(a, tiled, tiles, first, last, index, index + 1 < end ? panel_of(a, index + 1) : behind);
}

/* Packs a tile into the block that begins with tile `first`. */
static void pack_vector_tile(const linear_args *a, float *packed, int64_t tiles, int64_t first, int64_t tile) {
    int64_t begin = tile_begin(a->rows, tiles, tile), first_row = tile_begin(a->rows, tiles, first);
    pack_tile(a, packed + (begin - first_row) * row_floats(a), begin, tile_begin(a->rows, tiles, tile + 1));
}
