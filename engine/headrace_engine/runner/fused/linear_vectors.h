/* Products by vectors: a tile of at most TILE rows and a panel, whose sums stay in registers. Rows are copied into tiles,
 * [tiles][in][rows of the tile]; two inputs are one step where bfloat16 is multiplied in pairs, [in / 2][rows][2]. */
#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE 6 /* 12 sums, 2 vectors of weights and a broadcast: 15 of 16 registers */
#else
#define TILE 8 /* 24 sums, 3 vectors of weights and a broadcast: 28 of 32 registers */
#endif
#define MOST_DEPTH 1024 /* inputs that are summed before sums are put aside: a panel's part of them stays in L2 */
#define SOON 16         /* inputs between asking for weights and multiplying with them */
/* At most: tiles that are multiplied with one panel before the next, and stay in L2. */
#define BLOCK_TILES (144 / TILE)
#define BLOCK_BYTES (512 << 10)

/* Of a block. Few rows are multiplied with each panel as soon as it is there. */
static inline int64_t most_vector_tiles(int64_t steps, int64_t tiles) {
    int64_t fit = BLOCK_BYTES / ((int64_t)sizeof(float) * TILE * steps);
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
        f32x w[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) w[j] = load_step(weight, (int64_t)k * PANEL + j * LANES, kind);
        __builtin_prefetch(ahead.line, 0, 2);
        ahead.line += ahead.stride;
        if (--ahead.lines == 0) ask_for_piece(&ahead);
        /* What the processor fetches by itself on its way from L2 comes late. */
        const char *soon = (const char *)weight + (int64_t)(k + SOON) * PANEL * step_bytes(kind);
        for (int at = 0; at < PANEL * step_bytes(kind); at += 64) __builtin_prefetch(soon + at, 0, 3);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
            for (int j = 0; j < VECTORS; j++) sum[i][j] = add_product(sum[i][j], tile + (int64_t)k * ROWS + i, w[j], kind);
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
MULTIPLY(multiply_bfloat16, BFLOAT16)
MULTIPLY(multiply_pairs, PAIRS)

/* Rows are spread evenly over as few tiles as can hold them. */
static inline int64_t tile_begin(int64_t rows, int64_t tiles, int64_t tile) { return rows * tile / tiles; }

#ifdef __AVX512F__
/* A vector of steps of the row that begins at `from`. */
static inline __attribute__((always_inline)) f32x
load_steps(const linear_args *a, int64_t from, int step, float scale, int kind) {
    if (kind != PAIRS) return load_inputs(a, from, step, scale, kind);
    uint16_t normed[2 * LANES];
    for (int at = 0; at < 2 * LANES && a->norm_weight; at += LANES)
        store_vector(normed, at, load_inputs(a, from, 2 * step + at, scale, BFLOAT16), BFLOAT16);
    f32x pairs;
    memcpy(&pairs, a->norm_weight ? normed : (const uint16_t *)a->x + from + 2 * step, sizeof pairs);
    return pairs;
}

/* The steps of a tile that fill vectors. Returns how many these are. */
static inline __attribute__((always_inline)) int
pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int kind) {
    int step = 0, end = kind == PAIRS ? a->in_features / 2 : a->in_features;
    for (; step + LANES <= end; step += LANES, target += LANES * rows) {
        f32x array[MOST_INTERLEAVED] = {0};
        for (int i = 0; i < rows; i++) array[i] = load_steps(a, (begin + i) * a->x_stride, step, scales[i], kind);
        interleave(target, array, rows);
    }
    return step;
}
#else
static int pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int kind) {
    (void)a, (void)target, (void)begin, (void)rows, (void)scales, (void)kind;
    return 0;
}
#endif

static void pack_tile(const linear_args *a, float *target, int64_t begin, int64_t end) {
    int rows = (int)(end - begin), kind = kind_of(a->dtype), steps = num_steps(kind, a->in_features), done;
    float scales[TILE] = {0};
    for (int i = 0; i < rows && a->norm_weight; i++) scales[i] = inverse_rms(a, (begin + i) * a->x_stride);
    if (kind == PAIRS) done = pack_vectors(a, target, begin, rows, scales, PAIRS);
    else if (kind == BFLOAT16) done = pack_vectors(a, target, begin, rows, scales, BFLOAT16);
    else done = pack_vectors(a, target, begin, rows, scales, FLOAT32);
    if (kind == PAIRS && a->in_features % 2) memset(target + (steps - 1) * rows, 0, sizeof(float) * rows); /* no second */
    for (int i = 0; i < rows; i++)
        for (int k = kind == PAIRS ? 2 * done : done; k < a->in_features; k++) {
            float x = load_input(a, (begin + i) * a->x_stride, k, scales[i]);
            if (kind == PAIRS) store_scalar(target + k / 2 * rows + i, k % 2, x, BFLOAT16);
            else target[k * rows + i] = x;
        }
}

/* A part of a panel in float32, for tiles after the first to share the work of widening it. */
static void widen(float *wide, const void *weight, int depth) {
    for (int64_t i = 0; i < (int64_t)depth * PANEL; i += LANES) *(f32x *)(wide + i) = load_vector(weight, i, BFLOAT16);
}

/* For one of the tiles that are multiplied with a part of a panel. All need the `size` bytes behind it next. Where fewer
 * tiles can ask for these, a line a step, the others ask for what attention reads. */
static requests plan_requests(const linear_args *a, const char *behind, int64_t size, int depth, int64_t tile, int64_t tiles) {
    int64_t step = size / depth, needed = (step + LINE - 1) / LINE;
    if (!a->upcoming || tiles <= needed)
        return (requests){.line = behind + size * tile / tiles, .stride = (int)((step + tiles - 1) / tiles), .lines = INT32_MAX};
    if (tile < needed) return (requests){.line = behind + size * tile / needed, .stride = LINE, .lines = INT32_MAX};
    /* Of a piece with more lines than the tile has steps the rest is left. */
    upcoming_blocks *u = a->upcoming;
    int64_t pieces = 2 * depth * LINE / (u->bytes[0] + u->bytes[1]), claimed;
    requests own = {.line = behind, .upcoming = u, .lines = INT32_MAX};
#pragma omp atomic read
    claimed = u->claimed;
    if (claimed >= 2 * u->count) return own;
#pragma omp atomic capture
    {
        claimed = u->claimed;
        u->claimed += pieces ? pieces : 1;
    }
    own.piece = claimed, own.stride = LINE;
    ask_for_piece(&own);
    return own;
}

/* sums[rows][PANEL] of the rows of tiles first..last and one panel. */
static void multiply_panel(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int panel, float *sums) {
    float wide[MOST_DEPTH * PANEL] __attribute__((aligned(64))); /* a _Thread_local one is looked up for every vector */
    int kind = kind_of(a->dtype), bytes = PANEL * step_bytes(kind), steps = num_steps(kind, a->in_features);
    int chunks = (steps + MOST_DEPTH - 1) / MOST_DEPTH;
    int64_t top = tile_begin(a->rows, tiles, first);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (int)((int64_t)steps * chunk / chunks);
        int depth = (int)((int64_t)steps * (chunk + 1) / chunks) - from;
        const char *weight = (const char *)a->weight + ((int64_t)panel * steps + from) * bytes;
        int widened = kind == BFLOAT16 && last - first > 1;
        if (widened) widen(wide, weight, depth);
        int64_t size = (int64_t)depth * bytes;
        for (int64_t t = first; t < last; t++) {
            int64_t row = tile_begin(a->rows, tiles, t), rows = tile_begin(a->rows, tiles, t + 1) - row;
            const float *tile = tiled + (row - top) * steps + from * rows;
            requests ahead = plan_requests(a, weight + size, size, depth, t - first, last - first);
            (kind == PAIRS ? multiply_pairs : kind == FLOAT32 || widened ? multiply_float32 : multiply_bfloat16)(
                (int)rows, tile, widened ? (const void *)wide : weight, depth, sums + (row - top) * PANEL, chunk > 0, ahead);
        }
    }
}

/* All rows of tiles first..last times the panels begin..end; where the result is gated, times as many pairs of them. */
static void multiply_block_by_vectors(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int begin, int end) {
    float sums[BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
    float up[BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
    int gated = a->result == SILU_MUL, width = gated ? a->out_features / 2 : a->out_features;
    int64_t top = tile_begin(a->rows, tiles, first), bottom = tile_begin(a->rows, tiles, last);
    for (int index = begin; index < end; index++) {
        multiply_panel(a, tiled, tiles, first, last, gated ? 2 * index : index, sums);
        if (gated) multiply_panel(a, tiled, tiles, first, last, 2 * index + 1, up);
        int column = index * PANEL, left = width - column < PANEL ? width - column : PANEL;
        for (int64_t row = top; row < bottom; row++) {
            float *own = sums + (row - top) * PANEL, *other = gated ? up + (row - top) * PANEL : NULL;
            if (a->dtype == FLOAT32) finish_row(a, row, column, left, own, other, FLOAT32);
            else finish_row(a, row, column, left, own, other, BFLOAT16);
        }
    }
}

/* Tile `tile` to its place among those of a block that begins with tile `first`. */
static void pack_vector_tile(const linear_args *a, float *packed, int64_t tiles, int64_t first, int64_t tile) {
    int64_t begin = tile_begin(a->rows, tiles, tile), top = tile_begin(a->rows, tiles, first);
    pack_tile(a, packed + (begin - top) * num_steps(kind_of(a->dtype), a->in_features), begin, tile_begin(a->rows, tiles, tile + 1));
}
