/* Products by matrix tiles, if the processor has them: bfloat16 in pairs, 32 inputs in each step.
 *
 * A panel has the layout of PAIRS, [steps][PANEL][2], with zeros after the last input. The input is copied into tiles of 16
 * rows, [tiles][in / 32][16 rows][32], with zeros after the last row and input. Two tiles of rows are multiplied with a panel,
 * or a part of it, at a time. Their six tiles of sums stay in registers. */
/* Limits of a block: tiles of rows that are multiplied with one panel before the next. They stay in L2,
 * and so do two panels of dense weights, or the part of a panel of grouped weights that is unpacked. Each block unpacks all panels,
 * which takes as long as multiplying 20 to 60 rows. */
#define MAX_TILES 32
#define MAX_TILES_BYTES (768 << 10)
#define MAX_GROUPED_TILES_BYTES (1536 << 10)
#define MAX_GROUPED_PART 64 /* steps of grouped weights that are unpacked at once */

static inline int64_t max_matrix_tiles(const linear_args *a, int64_t pairs) {
    int64_t fit = (a->segments ? MAX_GROUPED_TILES_BYTES : MAX_TILES_BYTES) / (pairs * 4 * TILE_ROWS);
    return fit > MAX_TILES ? MAX_TILES : fit < 2 ? 2 : fit / 2 * 2;
}

#if HAS_MATRIX_TILES
#define ROW_BYTES (PANEL * 4) /* of a panel: one pair of inputs */
#define MAX_PART 6            /* steps of a panel that stay in L1 together with the same steps of the rows */
#define FEW_TILES 4           /* for this many tiles of rows, a panel is not divided */

static void pack_matrix_tile(const linear_args *a, float *packed, int64_t tile) {
    int in = a->in_features;
    char *target = (char *)packed;
    for (int64_t row = tile * TILE_ROWS; row < (tile + 1) * TILE_ROWS; row++, target += TILE_BYTES) {
        int64_t from = row * a->x_stride;
        float scale = row < a->rows && a->norm_weight ? norm_scale(a, from) : 1.0f;
        for (int k = 0; k < in; k += TILE_INPUTS) {
            uint16_t *place = (uint16_t *)(target + (int64_t)k / TILE_INPUTS * TILE_ROWS * TILE_BYTES);
            int known = row >= a->rows ? 0 : in - k < TILE_INPUTS ? in - k : TILE_INPUTS;
            if (known < TILE_INPUTS) memset(place, 0, TILE_BYTES);
            if (known == TILE_INPUTS && !a->norm_weight && !a->order) memcpy(place, (const uint16_t *)a->x + from + k, TILE_BYTES);
            else if (known == TILE_INPUTS)
                for (int i = 0; i < TILE_INPUTS; i += LANES)
                    store_vector(place, i, load_inputs(a, from, k + i, scale, BFLOAT16), BFLOAT16);
            else
                for (int i = 0; i < known; i++) store_scalar(place, i, load_input(a, from, k + i, scale), BFLOAT16);
        }
    }
}

/* What is prefetched during products: `lines` cache lines with each product. All at once would delay all other reads. */
typedef struct {
    const char *line, *end;
    int lines;
} tile_prefetch;

static inline void prefetch_lines(tile_prefetch *r) {
    for (int i = 0; i < r->lines && r->line < r->end; i++, r->line += LINE) __builtin_prefetch(r->line, 0, 2);
}

/* Computes sums[32][PANEL] of two tiles of rows, or [16][PANEL] of one. `begun`: add to the sums that are stored. */
static inline __attribute__((always_inline)) void
multiply_tiles(const char *x, int64_t x_bytes, const char *weight, int depth, float *sums, int begun, tile_prefetch *ahead,
               int two) {
    compiler_barrier();
    if (begun) {
        _tile_loadd(0, sums, ROW_BYTES);
        _tile_loadd(1, sums + TILE_ROWS, ROW_BYTES);
        _tile_loadd(2, sums + 2 * TILE_ROWS, ROW_BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    }
    float *second = sums + TILE_ROWS * PANEL;
    if (two && begun) {
        _tile_loadd(3, second, ROW_BYTES);
        _tile_loadd(4, second + TILE_ROWS, ROW_BYTES);
        _tile_loadd(5, second + 2 * TILE_ROWS, ROW_BYTES);
    } else if (two) {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
    }
    tile_prefetch own = *ahead;
    for (int k = 0; k < depth; k++, x += TILE_ROWS * TILE_BYTES, weight += TILE_ROWS * ROW_BYTES) {
        _tile_loadd(6, x, TILE_BYTES);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(0, 6, WEIGHT_TILE);
        prefetch_lines(&own);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(1, 6, WEIGHT_TILE);
        prefetch_lines(&own);
        _tile_loadd(WEIGHT_TILE, weight + 2 * TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(2, 6, WEIGHT_TILE);
        prefetch_lines(&own);
        if (!two) continue;
        _tile_loadd(6, x + x_bytes, TILE_BYTES);
        _tile_dpbf16ps(5, 6, WEIGHT_TILE);
        prefetch_lines(&own);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(4, 6, WEIGHT_TILE);
        prefetch_lines(&own);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(3, 6, WEIGHT_TILE);
        prefetch_lines(&own);
    }
    ahead->line = own.line;
    _tile_stored(0, sums, ROW_BYTES);
    _tile_stored(1, sums + TILE_ROWS, ROW_BYTES);
    _tile_stored(2, sums + 2 * TILE_ROWS, ROW_BYTES);
    if (two) {
        _tile_stored(3, second, ROW_BYTES);
        _tile_stored(4, second + TILE_ROWS, ROW_BYTES);
        _tile_stored(5, second + 2 * TILE_ROWS, ROW_BYTES);
    }
    compiler_barrier();
}

/* The rows that are multiplied with one panel before the next, and their sums. */
typedef struct {
    const char *packed;
    float *unpacked; /* space for a part of a panel of grouped weights */
    int64_t first_row, tiles;
    float sums[2][MAX_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64))); /* gate, up */
} row_block;

/* Spreads the prefetch of `bytes` bytes over `products` products of tiles. */
static tile_prefetch plan_tile_prefetch(const char *next, int64_t bytes, int64_t products) {
    if (!next) return (tile_prefetch){0};
    return (tile_prefetch){next, next + bytes, (int)((bytes / LINE + products - 1) / products)};
}

/* Computes the sums of one panel; a gated product has the gate first. For many rows the panel is divided into parts that stay
 * in L1. For a few rows that is slower than reading the panel from L2 again. Grouped weights are unpacked part by part. Results are
 * stored tile by tile. `next` is what is multiplied afterwards, or NULL. */
static __attribute__((noinline)) void
multiply_panel_by_matrix_tiles(const linear_args *a, row_block *b, int index, int half, const char *next) {
    int depth = (int)steps_of(a) / TILE_ROWS, gated = a->result == ACT_AND_MUL;
    int64_t tile_bytes = (int64_t)depth * TILE_ROWS * TILE_BYTES;
    panel_place p = place_of(a, index);
    const char *weight = a->segments ? NULL : panel_of(a, index) + half * panel_bytes(a);
    int most = a->segments ? MAX_GROUPED_PART : b->tiles > FEW_TILES ? MAX_PART : depth, parts = (depth + most - 1) / most;
    tile_prefetch ahead = plan_tile_prefetch(next, panel_bytes(a), b->tiles * VECTORS * depth);
    for (int part = 0; part < parts; part++) {
        int from = depth * part / parts, steps = depth * (part + 1) / parts - from;
        const char *w = a->segments ? (const char *)b->unpacked : weight + from * TILE_ROWS * ROW_BYTES;
        if (a->segments) unpack_panel(a, p, half, from * TILE_INPUTS, steps * TILE_INPUTS, b->unpacked, 1);
        for (int64_t tile = 0; tile < b->tiles; tile += 2) {
            const char *x = b->packed + tile * tile_bytes + from * TILE_ROWS * TILE_BYTES;
            int64_t row = b->first_row + tile * TILE_ROWS, rows = tile + 1 < b->tiles ? 2 * TILE_ROWS : TILE_ROWS;
            int64_t place = tile * TILE_ROWS * PANEL;
            if (tile + 1 < b->tiles) multiply_tiles(x, tile_bytes, w, steps, b->sums[half] + place, part > 0, &ahead, 1);
            else multiply_tiles(x, tile_bytes, w, steps, b->sums[half] + place, part > 0, &ahead, 0);
            if (part < parts - 1 || half < gated) continue;
            if (rows > a->rows - row) rows = a->rows - row;
            finish_tile(a, row, rows, p, b->sums[0] + place, gated ? b->sums[1] + place : NULL);
        }
    }
}

/* Multiplies the rows of tiles first..last with the panels begin..end, or as many pairs of panels if the result is gated.
 * `behind` are the weights that are multiplied next, or NULL. */
static void multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, float *unpacked, int64_t first, int64_t last,
                                           int begin, int end, const char *behind) {
    row_block b; /* uninitialised: the sums need no zeros */
    b.packed = (const char *)packed, b.unpacked = unpacked, b.first_row = first * TILE_ROWS, b.tiles = last - first;
    for (int index = begin; index < end; index++) {
        const char *next = index + 1 < end ? panel_of(a, index + 1) : behind;
        for (int half = 0; half <= (a->result == ACT_AND_MUL); half++)
            multiply_panel_by_matrix_tiles(a, &b, index, half, next ? next + half * panel_bytes(a) : NULL);
    }
}
#else
static void pack_matrix_tile(const linear_args *a, float *packed, int64_t tile) { (void)a, (void)packed, (void)tile; }
static void multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, float *unpacked, int64_t first, int64_t last,
                                           int begin, int end, const char *behind) {
    (void)a, (void)packed, (void)unpacked, (void)first, (void)last, (void)begin, (void)end, (void)behind;
}
#endif
