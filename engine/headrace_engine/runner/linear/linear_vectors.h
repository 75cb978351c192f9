/* Products by vectors: a tile of at most TILE rows and a panel, whose sums stay in registers. Rows are copied into tiles
 * of float32, [tiles][in][rows of the tile], or of pairs where these are multiplied, [tiles][in / 2][rows][2]. */
#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE 6 /* 12 sums, 2 vectors of weights and a broadcast: 15 of 16 registers */
#else
#define TILE 8 /* 24 sums, 3 vectors of weights and a broadcast: 28 of 32 registers */
#endif
#define MOST_DEPTH 1024 /* steps of a panel, or of two, that are summed before sums are put aside: they stay in L2 */
#define SOON 16         /* steps between asking for weights and multiplying with them */
#define WIDE_BYTES (24 << 10) /* of weights that are widened at once, and stay in L1 */
/* At most: tiles that are multiplied with a panel, or two, before the next, and stay in L2. */
#define BLOCK_TILES (144 / TILE)
#define BLOCK_BYTES (512 << 10)

/* Of a row in its tile, a step: one input, or one pair in its place; of widened pairs both inputs. */
static inline int floats_of_step(int kind) { return kind == WIDENED ? 2 : 1; }

static inline int64_t row_floats(const linear_args *a) {
    int kind = kind_of_weight(a->dtype);
    return (int64_t)num_steps(kind, a->in_features) * floats_of_step(kind);
}

/* Of a block. Few rows are multiplied with each panel as soon as it is there. */
static inline int64_t most_vector_tiles(int64_t row_floats, int64_t tiles) {
    int64_t fit = BLOCK_BYTES / ((int64_t)sizeof(float) * TILE * row_floats);
    return tiles <= BLOCK_TILES || fit > BLOCK_TILES ? BLOCK_TILES : fit < 1 ? 1 : fit;
}

/* What a tile asks memory for, with each step of its sums one line, `stride` bytes behind the last. Where `lines` are
 * asked for it goes on with the next of the upcoming pieces. */
typedef struct {
    const char *line;
    int64_t piece;
    const upcoming_blocks *upcoming;
    int stride, lines;
} requests;

static inline void ask_for_piece(requests *r) {
    int kind = (int)(r->piece % 2);
    r->lines = INT32_MAX;
    if (r->piece >= 2 * r->upcoming->count) return; /* it asks on behind the last one, which harms nobody */
    r->line = r->upcoming->base[kind] + r->upcoming->blocks[r->piece / 2] * r->upcoming->bytes[kind];
    r->lines = (int)(r->upcoming->bytes[kind] / LINE);
    r->piece++;
}

/* sums[ROWS][PANEL] of one tile and a part of one panel. */
static inline __attribute__((always_inline)) void
multiply_tile(const float *tile, const void *weight, int depth, float *sums, int begun, int ROWS, int kind, requests ahead) {
    f32x sum[TILE][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) sum[i][j] = begun ? *(f32x *)(sums + i * PANEL + j * LANES) : (f32x){0};
    for (int k = 0; k < depth; k++) {
        __builtin_prefetch(ahead.line, 0, 2);
        ahead.line += ahead.stride;
        if (--ahead.lines == 0) ask_for_piece(&ahead);
        /* What the processor fetches by itself on its way from L2 comes late. */
        const char *soon = (const char *)weight + (int64_t)(k + SOON) * PANEL * step_bytes(kind);
        for (int at = 0; at < PANEL * step_bytes(kind); at += 64) __builtin_prefetch(soon + at, 0, 3);
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

#define CASE(ROWS, KIND)                                                                            \
    case ROWS:                                                                                       \
        if (ROWS <= TILE) multiply_tile(tile, weight, depth, sums, begun, ROWS, KIND, ahead);  \
        break;
#define MULTIPLY(NAME, KIND)                                                                                       \
    static void NAME(int rows, const float *tile, const void *weight, int depth, float *sums, int begun,           \
                     requests ahead) {                                                                             \
        switch (rows) {                                                                                            \
            CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND)                                                \
            CASE(5, KIND) CASE(6, KIND) CASE(7, KIND) CASE(8, KIND)                                                \
        }                                                                                                          \
    }
MULTIPLY(multiply_float32, FLOAT32)
MULTIPLY(multiply_pairs, PAIRS)
MULTIPLY(multiply_widened, WIDENED)

/* Rows are spread evenly over as few tiles as can hold them. */
static inline int64_t tile_begin(int64_t rows, int64_t tiles, int64_t tile) { return rows * tile / tiles; }

#ifdef __AVX512F__
/* A vector of inputs of the row that begins at `from`, or of pairs of them. */
static inline __attribute__((always_inline)) f32x
load_row(const linear_args *a, int64_t from, int at, float scale, int dtype, int pairs) {
    if (!pairs) return load_inputs(a, from, at, scale, dtype);
    uint16_t normed[2 * LANES];
    for (int half = 0; half < 2 * LANES && a->norm_weight; half += LANES)
        store_vector(normed, half, load_inputs(a, from, 2 * at + half, scale, BFLOAT16), BFLOAT16);
    f32x found;
    memcpy(&found, a->norm_weight ? normed : (const uint16_t *)a->x + from + 2 * at, sizeof found);
    return found;
}

/* What of a tile fills vectors. Returns how many inputs, or pairs, these are. */
static inline __attribute__((always_inline)) int
pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int dtype, int pairs) {
    int at = 0, end = pairs ? a->in_features / 2 : a->in_features;
    for (; at + LANES <= end; at += LANES, target += LANES * rows) {
        f32x array[MOST_INTERLEAVED] = {0};
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
    for (int i = 0; i < rows && a->norm_weight; i++) scales[i] = inverse_rms(a, (begin + i) * a->x_stride);
    if (pairs) done = 2 * pack_vectors(a, target, begin, rows, scales, BFLOAT16, 1);
    else if (dtype == BFLOAT16) done = pack_vectors(a, target, begin, rows, scales, BFLOAT16, 0);
    else if (rows == TILE) done = pack_vectors(a, target, begin, TILE, scales, FLOAT32, 0); /* without a loop over rows */
    else done = pack_vectors(a, target, begin, rows, scales, FLOAT32, 0);
    if (a->in_features % 2 && dtype == BFLOAT16) /* the last pair has no second */
        memset(target + (row_floats(a) - 1) * rows, 0, sizeof(float) * rows);
    for (int i = 0; i < rows; i++)
        for (int k = done; k < a->in_features; k++) {
            float x = load_input(a, (begin + i) * a->x_stride, k, scales[i]);
            if (pairs) store_scalar(target + k / 2 * rows + i, k % 2, x, BFLOAT16);
            else target[k * rows + i] = x;
        }
}

/* A part of a panel of pairs in float32, for several tiles to share the work of widening it. */
static void widen(float *wide, const void *weight, int depth) {
    for (int64_t k = 0; k < depth; k++)
        for (int second = 0; second < 2; second++, wide += PANEL)
            for (int j = 0; j < PANEL; j += LANES) *(f32x *)(wide + j) = load_step(weight, k * PANEL + j, WIDENED, second);
}

/* For one of the tiles that are multiplied with a part of a panel. All need the `size` bytes at `next` afterwards, or
 * nothing where that is NULL. Where fewer tiles can ask for these, a line a step, the others ask for what attention reads. */
static requests plan_requests(const linear_args *a, const char *next, int64_t size, int depth, int64_t tile, int64_t tiles) {
    int64_t step = size / depth, needed = (step + LINE - 1) / LINE;
    requests own = {.line = a->weight, .lines = INT32_MAX}; /* of what is there already: costs nothing */
    if (!next && (!a->upcoming || tiles <= needed)) return own;
    if (!a->upcoming || tiles <= needed)
        return (requests){.line = next + size * tile / tiles, .stride = (int)((step + tiles - 1) / tiles), .lines = INT32_MAX};
    if (next && tile < needed) return (requests){.line = next + size * tile / needed, .stride = LINE, .lines = INT32_MAX};
    /* Of a piece with more lines than the tile has steps the rest is left. */
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
    ask_for_piece(&own);
    return own;
}

/* Lines that a tile's results go to are asked for before its products, and come while these are computed. The number is a
 * constant: of a narrow last panel some are asked for in vain. */
static void ask_for_results(const linear_args *a, int64_t row, int64_t rows, int column) {
    int element = a->dtype == FLOAT32 ? 4 : 2;
    for (int64_t i = 0; i < rows; i++)
        for (int at = 0; at < PANEL * element; at += LINE)
            __builtin_prefetch((const char *)a->out + ((row + i) * a->out_stride + column) * element + at, 1, 3);
}

/* All rows of tiles first..last times a panel or, where the result is gated, two of them. `behind` are the weights that
 * are multiplied next, or NULL. */
static void multiply_panel(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int index,
                           const char *behind) {
    float sums[2][BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
    float wide[WIDE_BYTES / 4] __attribute__((aligned(64)));
    int kind = kind_of_weight(a->dtype), bytes = PANEL * step_bytes(kind), steps = num_steps(kind, a->in_features);
    int halves = a->result == SILU_MUL ? 2 : 1;
    int widens = kind == WIDENED && last - first > 2; /* else each tile does it, while it waits for memory */
    int most = widens ? WIDE_BYTES / (2 * bytes) / halves : MOST_DEPTH, chunks = (steps + most - 1) / most;
    int64_t top = tile_begin(a->rows, tiles, first);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (int)((int64_t)steps * chunk / chunks);
        int depth = (int)((int64_t)steps * (chunk + 1) / chunks) - from;
        int64_t size = (int64_t)depth * bytes, to_other = panel_bytes(a);
        const char *weight = panel_of(a, index) + (int64_t)from * bytes;
        const char *next = chunk < chunks - 1 ? weight + size : behind;
        for (int half = 0; half < halves && widens; half++) widen(wide + half * WIDE_BYTES / 8, weight + half * to_other, depth);
        for (int64_t t = first; t < last; t++) {
            int64_t row = tile_begin(a->rows, tiles, t), rows = tile_begin(a->rows, tiles, t + 1) - row;
            const float *tile = tiled + (row - top) * row_floats(a) + from * rows * floats_of_step(kind);
            int64_t place = (row - top) * PANEL;
            if (chunk == chunks - 1) ask_for_results(a, row, rows, index * PANEL);
            for (int half = 0; half < halves; half++) {
                const char *own = weight + half * to_other, *later = next ? next + half * to_other : NULL;
                requests ahead = plan_requests(a, later, size, widens ? 2 * depth : depth, t - first, last - first);
                if (kind == PAIRS) multiply_pairs((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
                else if (kind == FLOAT32) multiply_float32((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
                else if (widens) multiply_float32((int)rows, tile, wide + half * WIDE_BYTES / 8, 2 * depth, sums[half] + place, chunk > 0, ahead);
                else multiply_widened((int)rows, tile, own, depth, sums[half] + place, chunk > 0, ahead);
            }
            if (chunk == chunks - 1) finish_tile(a, row, rows, index * PANEL, sums[0] + place, halves > 1 ? sums[1] + place : NULL);
        }
    }
}

/* The same of the panels begin..end, or as many pairs of them. */
static void multiply_block_by_vectors(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last,
                                      int begin, int end, const char *behind) {
    for (int index = begin; index < end; index++)
        multiply_panel(a, tiled, tiles, first, last, index, index + 1 < end ? panel_of(a, index + 1) : behind);
}

/* Tile `tile` to its place among those of a block that begins with tile `first`. */
static void pack_vector_tile(const linear_args *a, float *packed, int64_t tiles, int64_t first, int64_t tile) {
    int64_t begin = tile_begin(a->rows, tiles, tile), top = tile_begin(a->rows, tiles, first);
    pack_tile(a, packed + (begin - top) * row_floats(a), begin, tile_begin(a->rows, tiles, tile + 1));
}
