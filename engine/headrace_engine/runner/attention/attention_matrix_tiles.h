/* A unit of work by matrix tiles, where the processor has them and the caches lie for them.
 *
 * Rows are taken 48 at a time, three tiles, for each chunk of keys: their scores stay in L1, and the chunk in L2 for all
 * rows of the unit. Keys are taken two columns at a time, as a tile multiplies 32 of their values. */
#define TILED_ROWS (3 * TILE_ROWS)
#define MOST_SUBUNITS 4 /* of 48 rows: keys and values come from memory once for so many */

/* Memory of a thread: of rows as many as a unit can have, but scores of one subunit. */
typedef struct {
    f32x *total;
    float *most, *scores, *mixed;
    char *queries, *tail;
} tiled_scratch;

static inline int tokens_of_subunit(const attention_args *a) {
    int group = a->layer.num_heads / a->layer.num_kv_heads;
    return group < TILED_ROWS ? TILED_ROWS / group : 1;
}

static inline int fits_matrix_tiles(const layer_args *l) {
    return matrix_tiles_lent && kind_of_cache(l) == PAIRS && l->k_dim % TILE_INPUTS == 0 && l->block_size % TILE_INPUTS == 0 &&
           l->num_heads / l->num_kv_heads <= TILED_ROWS;
}

/* Returns how many floats it is; with memory for so many, at the begin of a cache line, it is divided up. */
static int64_t divide_scratch(const attention_args *a, int subunits, float *memory, tiled_scratch *s) {
    int64_t rows = (int64_t)subunits * TILED_ROWS, v_stride = padded(a->layer.v_dim);
    s->total = (f32x *)memory;
    s->scores = memory + rows * LANES;
    s->mixed = s->scores + TILED_ROWS * CHUNK * LANES;
    s->tail = (char *)(s->mixed + rows * v_stride);
    s->queries = s->tail + 4 * TILE_ROWS * v_stride;
    s->most = (float *)(s->queries + rows * a->layer.k_dim * 2);
    return s->most + rows - memory;
}

#if HAS_MATRIX_TILES
/* [tiles of rows][k_dim / 32][16 rows][32], zeros behind the last row. */
static void pack_query_tiles(const attention_args *a, const unit *u, char *target, int first, int rows) {
    int group = a->layer.num_heads / a->layer.num_kv_heads;
    int64_t tile_bytes = (int64_t)a->layer.k_dim * 2 * TILE_ROWS;
    for (int row = 0; row < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; row++) {
        char *place = target + row / TILE_ROWS * tile_bytes + row % TILE_ROWS * TILE_BYTES;
        const uint16_t *query = (const uint16_t *)a->step.query + token_of(u, group, first + row) * a->step.query_token_stride +
                                head_of(u, group, first + row) * a->step.query_head_stride;
        for (int d = 0; d < a->layer.k_dim; d += TILE_INPUTS, place += TILE_ROWS * TILE_BYTES)
            if (row < rows) memcpy(place, query + d, TILE_BYTES);
            else memset(place, 0, TILE_BYTES);
    }
}

/* scores[tiles of rows][one column of keys] = queries . keys */
static inline __attribute__((always_inline)) void
score_column(const char *queries, const char *keys, int64_t key_stride, int steps, float *scores, int tiles) {
    const int64_t stride = CHUNK * LANES * 4, tile_bytes = (int64_t)steps * TILE_ROWS * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int step = 0; step < steps; step++, keys += TILE_ROWS * key_stride, queries += TILE_ROWS * TILE_BYTES) {
        _tile_loadd(7, keys, key_stride);
        _tile_loadd(4, queries, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 7);
        if (tiles > 1) {
            _tile_loadd(5, queries + tile_bytes, TILE_BYTES);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (tiles > 2) {
            _tile_loadd(6, queries + 2 * tile_bytes, TILE_BYTES);
            _tile_dpbf16ps(2, 6, 7);
        }
    }
    _tile_stored(0, scores, stride);
    if (tiles > 1) _tile_stored(1, scores + TILE_ROWS * CHUNK * LANES, stride);
    if (tiles > 2) _tile_stored(2, scores + 2 * TILE_ROWS * CHUNK * LANES, stride);
}

/* mixed[tiles of rows][16 components] += weights . values of 32 keys each */
static inline __attribute__((always_inline)) void
mix_column(const char *weights, const char *const *values, int64_t value_stride, int groups, int lane, float *mixed, int tiles) {
    const int64_t stride = CHUNK * LANES * 4, next = value_stride / 4 * TILE_ROWS;
    mixed += lane;
    _tile_loadd(0, mixed, value_stride);
    if (tiles > 1) _tile_loadd(1, mixed + next, value_stride);
    if (tiles > 2) _tile_loadd(2, mixed + 2 * next, value_stride);
    for (int group = 0; group < groups; group++, weights += TILE_BYTES) {
        _tile_loadd(7, values[group] + lane * 4, value_stride);
        _tile_loadd(4, weights, stride);
        _tile_dpbf16ps(0, 4, 7);
        if (tiles > 1) {
            _tile_loadd(5, weights + TILE_ROWS * stride, stride);
            _tile_dpbf16ps(1, 5, 7);
        }
        if (tiles > 2) {
            _tile_loadd(6, weights + 2 * TILE_ROWS * stride, stride);
            _tile_dpbf16ps(2, 6, 7);
        }
    }
    _tile_stored(0, mixed, value_stride);
    if (tiles > 1) _tile_stored(1, mixed + next, value_stride);
    if (tiles > 2) _tile_stored(2, mixed + 2 * next, value_stride);
}

#define BY_TILES(FUNCTION, ...)                     \
    (tiles == 1   ? FUNCTION(__VA_ARGS__, 1)        \
     : tiles == 2 ? FUNCTION(__VA_ARGS__, 2)        \
                  : FUNCTION(__VA_ARGS__, 3))

static __attribute__((noinline)) void
score_chunk_by_tiles(const attention_args *a, const char *queries, const chunk *now, const chunk *next, float *scores, int tiles) {
    int64_t stride = (int64_t)a->layer.block_size * 4;
    int pairs = a->layer.k_dim / 2;
    settle_memory();
    for (int c = 0; c < now->num_columns; c++) {
        for (int pair = 0; next && pair < pairs; pair++) __builtin_prefetch(next->k[c] + pair * stride, 0, 2);
        BY_TILES(score_column, queries, now->k[c], stride, pairs / TILE_ROWS, scores + c * LANES);
    }
    settle_memory();
}

static __attribute__((noinline)) void
mix_chunk_by_tiles(const attention_args *a, const float *weights, const chunk *now, const char *tail, const chunk *next, float *mixed, int tiles) {
    int v_stride = padded(a->layer.v_dim), groups = now->num_columns / 2;
    const char *values[CHUNK / 2];
    for (int g = 0; g < groups; g++) values[g] = now->v[2 * g];
    if (tail) values[groups - 1] = tail;
    settle_memory();
    for (int lane = 0; lane < v_stride; lane += LANES) {
        for (int at = 0; next && at < groups * TILE_ROWS; at++)
            __builtin_prefetch(next->v[at / TILE_ROWS * 2] + (lane * TILE_ROWS * 4) + at % TILE_ROWS * LINE, 0, 2);
        BY_TILES(mix_column, (const char *)weights, values, (int64_t)v_stride * 4, groups, lane, mixed);
    }
    settle_memory();
}

/* The last 32 values of a unit, of which only some are there: the others' places may hold anything. */
static const char *copy_tail(const attention_args *a, const chunk *now, int num_keys, char *tail) {
    int row_bytes = padded(a->layer.v_dim) * 4, left = num_keys % TILE_INPUTS;
    if (!left) return NULL;
    const char *values = now->v[num_keys / TILE_INPUTS * 2];
    memset(tail, 0, TILE_ROWS * row_bytes);
    memcpy(tail, values, left / 2 * row_bytes);
    if (left % 2)
        for (int d = 0; d < row_bytes; d += 4) copy_pair(tail + left / 2 * row_bytes + d, (const uint16_t *)(values + left / 2 * row_bytes + d), 0, 1);
    return tail;
}

/* Scores, weights and sums of some rows of a unit and a chunk of keys. */
static void attend_rows(const attention_args *a, const unit *u, const tiled_scratch *s, const chunk *now, const chunk *next,
                        const char *tail, int first, int rows) {
    int group = a->layer.num_heads / a->layer.num_kv_heads, v_stride = padded(a->layer.v_dim), first_key = now->first_column * LANES;
    int padded_first = first / (tokens_of_subunit(a) * group) * TILED_ROWS, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    float *mixed = s->mixed + (int64_t)padded_first * v_stride, *most = s->most + first;
    score_chunk_by_tiles(a, s->queries + (int64_t)padded_first * a->layer.k_dim * 2, now, next, s->scores, tiles);
    for (int row = 0; row < rows; row++)
        finish_scores(a, s->scores + row * CHUNK * LANES, now->num_columns, first_key,
                      first_position(a, u) + (first + row) / group, most + row, s->total + first + row, mixed + row * v_stride, PAIRS);
    soften(a, s->scores, now->num_columns, most, s->total + first, rows, PAIRS);
    mix_chunk_by_tiles(a, s->scores, now, tail, next, mixed, tiles);
}

static void attend_by_matrix_tiles(const attention_args *a, const unit *u, const unit *upcoming, walk *ahead, const tiled_scratch *s) {
    int group = a->layer.num_heads / a->layer.num_kv_heads, rows = u->num_tokens * group, v_stride = padded(a->layer.v_dim);
    int step = tokens_of_subunit(a) * group, num_positions = first_position(a, u) + u->num_tokens;
    for (int first = 0; first < rows; first += step)
        pack_query_tiles(a, u, s->queries + (int64_t)first / step * TILED_ROWS * a->layer.k_dim * 2, first, min(step, rows - first));
    begin_rows(a, u, rows, s->most, s->total);
    int last = rows % step ? rows % step : step; /* rows of the last subunit */
    memset(s->mixed, 0, sizeof(float) * ((rows - last) / step * TILED_ROWS + (last + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS) * v_stride);
    for (walk w = begin(a, u, oldest_column(a, u)); w.column < w.end;) {
        const chunk now = next_chunk(a, &w, PAIRS), next = look_ahead(a, &now, ahead, &upcoming, PAIRS);
        int first_key = now.first_column * LANES, num_keys = num_positions - first_key, asked = 0;
        const char *tail = num_keys < now.num_columns * LANES ? copy_tail(a, &now, num_keys, s->tail) : NULL;
        for (int first = 0; first < rows; first += step) {
            int count = min(step, rows - first);
            if (first_key > first_position(a, u) + (first + count - 1) / group) continue; /* all of them are in the future */
            attend_rows(a, u, s, &now, asked ? NULL : &next, tail, first, count);
            asked = 1;
        }
    }
    for (int first = 0; first < rows; first += step)
        for (int row = first; row < first + step && row < rows; row++)
            finish_output(a, u, row, s->mixed + ((int64_t)first / step * TILED_ROWS + row - first) * v_stride, s->total[row], BFLOAT16);
}
#else
static void attend_by_matrix_tiles(const attention_args *a, const unit *u, const unit *upcoming, walk *ahead, const tiled_scratch *s) {
    (void)a, (void)u, (void)upcoming, (void)ahead, (void)s;
}
#endif
