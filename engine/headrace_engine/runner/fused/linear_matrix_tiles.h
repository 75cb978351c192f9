/* Products by matrix tiles, where the processor has them: bfloat16 in pairs, 32 inputs a step.
 *
 * A panel lies as for PAIRS, [steps][PANEL][2], zeros behind the last input; the input is copied into tiles of 16 rows,
 * [tiles][in / 32][16 rows][32], zeros behind the last row and input. Two tiles of rows and a panel are multiplied at a
 * time, their six tiles of sums in registers from the first input to the last. */
#define MOST_TILES 32 /* of rows, that are multiplied with one panel before the next, */
#define MOST_TILES_BYTES (768 << 10) /* and stay in L2 */

static inline int64_t pairs_in_tiles(int in) { return (in + TILE_INPUTS - 1) / TILE_INPUTS * (TILE_INPUTS / 2); }

static inline int64_t most_matrix_tiles(int64_t pairs) {
    int64_t fit = MOST_TILES_BYTES / (pairs * 4 * TILE_ROWS);
    return fit > MOST_TILES ? MOST_TILES : fit < 2 ? 2 : fit / 2 * 2;
}

#if HAS_MATRIX_TILES
#define ROW_BYTES (PANEL * 4) /* of a panel: of one pair */
#define MOST_PART 6           /* steps of a panel: with as many of rows they stay in L1 */

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

/* sums[32][PANEL] of two tiles of rows, or [16][PANEL] of one; `begun`: what stands there is added to. */
static inline __attribute__((always_inline)) void
multiply_tiles(const char *x, int64_t x_bytes, const char *weight, int depth, float *sums, int begun, const char *ahead,
               int lines, int two) {
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
    for (int k = 0; k < depth; k++, x += TILE_ROWS * TILE_BYTES, weight += TILE_ROWS * ROW_BYTES) {
        for (int i = 0; i < lines; i++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
        _tile_loadd(6, x, TILE_BYTES);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(0, 6, WEIGHT_TILE);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(1, 6, WEIGHT_TILE);
        _tile_loadd(WEIGHT_TILE, weight + 2 * TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(2, 6, WEIGHT_TILE);
        if (!two) continue;
        _tile_loadd(6, x + x_bytes, TILE_BYTES);
        _tile_dpbf16ps(5, 6, WEIGHT_TILE);
        _tile_loadd(WEIGHT_TILE, weight + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(4, 6, WEIGHT_TILE);
        _tile_loadd(WEIGHT_TILE, weight, ROW_BYTES);
        _tile_dpbf16ps(3, 6, WEIGHT_TILE);
    }
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

/* sums[rows of tiles][PANEL] of one panel, by parts of it that stay in L1 for all rows. */
static __attribute__((noinline)) void
multiply_panel_by_matrix_tiles(const char *packed, int64_t tiles, const char *weight, int depth, float *sums, const char *ahead) {
    int64_t tile_bytes = (int64_t)depth * TILE_ROWS * TILE_BYTES, turns = (tiles + 1) / 2;
    int lines = (int)((TILE_ROWS * ROW_BYTES / LINE + turns - 1) / turns);
    int parts = turns > 1 ? (depth + MOST_PART - 1) / MOST_PART : 1;
    for (int part = 0; part < parts; part++) {
        int from = depth * part / parts, steps = depth * (part + 1) / parts - from;
        for (int64_t tile = 0; tile < tiles; tile += 2, ahead += steps * lines * LINE) {
            const char *x = packed + tile * tile_bytes + from * TILE_ROWS * TILE_BYTES;
            const char *w = weight + from * TILE_ROWS * ROW_BYTES;
            float *own = sums + tile * TILE_ROWS * PANEL;
            if (tile + 1 < tiles) multiply_tiles(x, tile_bytes, w, steps, own, part > 0, ahead, lines, 1);
            else multiply_tiles(x, tile_bytes, w, steps, own, part > 0, ahead, lines, 0);
        }
    }
}

/* All rows of tiles first..last times the panels begin..end; where the result is gated, times as many pairs of them. */
static void
multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, int64_t first, int64_t last, int begin, int end) {
    float sums[2][MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64))); /* of the gate, and of up */
    int gated = a->result == SILU_MUL, width = gated ? a->out_features / 2 : a->out_features;
    int depth = (a->in_features + TILE_INPUTS - 1) / TILE_INPUTS;
    int64_t panel_bytes = (int64_t)depth * TILE_ROWS * ROW_BYTES, top = first * TILE_ROWS;
    int64_t bottom = last * TILE_ROWS < a->rows ? last * TILE_ROWS : a->rows;
    for (int index = begin; index < end; index++) {
        const char *weight = (const char *)a->weight + index * panel_bytes * (1 + gated);
        int column = index * PANEL, left = width - column < PANEL ? width - column : PANEL;
        for (int half = 0; half <= gated; half++)
            multiply_panel_by_matrix_tiles((const char *)packed, last - first, weight + half * panel_bytes, depth, sums[half],
                                           weight + (1 + gated + half) * panel_bytes);
        for (int64_t row = top; row < bottom; row++)
            finish_row(a, row, column, left, sums[0] + (row - top) * PANEL, gated ? sums[1] + (row - top) * PANEL : NULL,
                       BFLOAT16);
    }
}
#else
static void pack_matrix_tile(const linear_args *a, float *packed, int64_t tile) { (void)a, (void)packed, (void)tile; }
static void multiply_block_by_matrix_tiles(const linear_args *a, const float *packed, int64_t first, int64_t last, int begin, int end) {
    (void)a, (void)packed, (void)first, (void)last, (void)begin, (void)end;
}
#endif
