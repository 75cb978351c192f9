/* Products by matrix tiles, where the processor has them: bfloat16 in pairs, 32 inputs a step.
 *
 * A panel lies as for PAIRS, [steps][PANEL][2], zeros behind the last input; the input is copied into tiles of 16 rows,
 * [tiles][in / 32][16 rows][32], zeros behind the last row and input. Two tiles of rows and a panel, or a part of it, are
 * multiplied at a time, their six tiles of sums in registers. */
#define MOST_TILES 32 /* of rows, that are multiplied with one panel before the next, */
#define MOST_TILES_BYTES (768 << 10) /* and stay in L2 */

static inline int64_t most_matrix_tiles(int64_t pairs) {
    int64_t fit = MOST_TILES_BYTES / (pairs * 4 * TILE_ROWS);
    return fit > MOST_TILES ? MOST_TILES : fit < 2 ? 2 : fit / 2 * 2;
}

#if HAS_MATRIX_TILES
#define ROW_BYTES (PANEL * 4) /* of a panel: of one pair */
#define MOST_PART 6           /* steps of a panel: with as many of rows they stay in L1 */
#define FEW_TILES 4           /* of rows, for which a panel is not taken in parts */

static void pack_matrix_tile(const linear_args *a, float *packed, int64_t tile) {
    int in = a->in_features;
    char *target = (char *)packed;
    for (int64_t row = tile * TILE_ROWS; row < (tile + 1) * TILE_ROWS; row++, target += TILE_BYTES) {
        int64_t from = row * a->x_stride;
        float scale = row < a->rows && a->norm_weight ? inverse_rms(a, from) : 1.0f;
        for (int k = 0; k < in; k += TILE_INPUTS) {
            uint16_t *place = (uint16_t *)(target + (int64_t)k / TILE_INPUTS * TILE_ROWS * TILE_BYTES);
            int known = row >= a->rows ? 0 : in - k < TILE_INPUTS ? in - k : TILE_INPUTS;
            if (known < TILE_INPUTS) memset(place, 0, TILE_BYTES);
            if (known == TILE_INPUTS && !a->norm_weight) memcpy(place, (const uint16_t *)a->x + from + k, TILE_BYTES);
            else if (known == TILE_INPUTS)
                for (int i = 0; i < TILE_INPUTS; i += LANES)
                    store_vector(place, i, load_inputs(a, from, k + i, scale, BFLOAT16), BFLOAT16);
            else
                for (int i = 0; i < known; i++) store_scalar(place, i, load_input(a, from, k + i, scale), BFLOAT16);
        }
    }
}

/* What memory is asked for while products are computed, so many lines with each: in one go they would keep all else from
 * coming. */
typedef struct {
    const char *line, *end;
    int lines;
} tile_requests;

static inline void ask(tile_requests *r) {
    for (int i = 0; i < r->lines && r->line < r->end; i++, r->line += LINE) __builtin_prefetch(r->line, 0, 2);
}

/* sums[32][PANEL] of two tiles of rows, or [16][PANEL] of one; `begun`: what stands there is added to. */
static inline __attribute__((always_inline)) void
multiply_tiles(const char *x, int64_t x_bytes, const char *weight, int depth, float *sums, int begun, tile_requests *ahead,
               int two) {
    settle_memory();
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
    tile_requests own = *ahead;
    for (int k = 0; k < depth; k++, x += TILE_ROWS * TILE_BYTES, weight += TILE_ROWS * ROW_BYTES) {
        _tile_loadd(6, x, TILE_BYTES);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(0, 6, WEIGHT_TILE);
        ask(&own);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(1, 6, WEIGHT_TILE);
        ask(&own);
        _tile_loadd(WEIGHT_TILE, weight + 2 * TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(2, 6, WEIGHT_TILE);
        ask(&own);
        if (!two) continue;
        _tile_loadd(6, x + x_bytes, TILE_BYTES);
        _tile_dpbf16ps(5, 6, WEIGHT_TILE);
        ask(&own);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(4, 6, WEIGHT_TILE);
        ask(&own);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(3, 6, WEIGHT_TILE);
        ask(&own);
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
    settle_memory();
}

/* Rows that are multiplied with one panel before the next, and their sums. */
typedef struct {
    const char *packed;
    int64_t first_row, tiles;
    float sums[2][MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64))); /* of the gate, and of up */
} row_block;

/* Of so many products of tiles, which take turns in asking. */
static tile_requests plan_tile_requests(const char *next, int64_t bytes, int64_t products) {
    if (!next) return (tile_requests){0};
    return (tile_requests){next, next + bytes, (int)((bytes / LINE + products - 1) / products)};
}

/* Sums of one panel; of a gated product the gate's come first. Many rows go by parts of it that stay in L1 for all of
 * them; of few, to put sums aside would take longer than to read the panel from L2 again. Results go out tile by tile, as
 * soon as these are summed. `next` is what is multiplied afterwards, or NULL. */
static __attribute__((noinline)) void
multiply_panel_by_matrix_tiles(const linear_args *a, row_block *b, int index, int half, const char *next) {
    int depth = (int)steps_of(a) / TILE_ROWS, gated = a->result == SILU_MUL;
    int64_t tile_bytes = (int64_t)depth * TILE_ROWS * TILE_BYTES;
    const char *weight = panel_of(a, index) + half * panel_bytes(a);
    int parts = b->tiles > FEW_TILES ? (depth + MOST_PART - 1) / MOST_PART : 1;
    tile_requests ahead = plan_tile_requests(next, panel_bytes(a), b->tiles * VECTORS * depth);
    for (int part = 0; part < parts; part++) {
        int from = depth * part / parts, steps = depth * (part + 1) / parts - from;
        const char *w = weight + from * TILE_ROWS * ROW_BYTES;
        for (int64_t tile = 0; tile < b->tiles; tile += 2) {
            const char *x = b->packed + tile * tile_bytes + from * TILE_ROWS * TILE_BYTES;
            int64_t row = b->first_row + tile * TILE_ROWS, rows = tile + 1 < b->tiles ? 2 * TILE_ROWS : TILE_ROWS;
            int64_t place = tile * TILE_ROWS * PANEL;
            if (tile + 1 < b->tiles) multiply_tiles(x, tile_bytes, w, steps, b->sums[half] + place, part > 0, &ahead, 1);
            else multiply_tiles(x, tile_bytes, w, steps, b->sums[half] + place, part > 0, &ahead, 0);
            if (part < parts - 1 || half < gated) continue;
            if (rows > a->rows - row) rows = a->rows - row;
            finish_tile(a, row, rows, index * PANEL, b->sums[0] + place, gated ? b->sums[1] + place : NULL);
        }
    }
}

/* All rows of tiles first..last times the panels begin..end; where the result is gated, times as many pairs of them.
 * `behind` are the weights that are multiplied next, or NULL. */
static void multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, int64_t first, int64_t last, int begin,
                                           int end, const char *behind) {
    row_block b; /* whose sums need no zeros */
    b.packed = (const char *)packed, b.first_row = first * TILE_ROWS, b.tiles = last - first;
    for (int index = begin; index < end; index++) {
        const char *next = index + 1 < end ? panel_of(a, index + 1) : behind;
        for (int half = 0; half <= (a->result == SILU_MUL); half++)
            multiply_panel_by_matrix_tiles(a, &b, index, half, next ? next + half * panel_bytes(a) : NULL);
    }
}
#else
static void pack_matrix_tile(const linear_args *a, float *packed, int64_t tile) { (void)a, (void)packed, (void)tile; }
static void multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, int64_t first, int64_t last, int begin,
                                           int end, const char *behind) {
    (void)a, (void)packed, (void)first, (void)last, (void)begin, (void)end, (void)behind;
}
#endif
