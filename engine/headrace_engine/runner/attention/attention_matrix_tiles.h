/* Computes a unit of work by matrix tiles, if the processor has them and the layout of the caches fits.
 *
 * For each chunk of keys, 48 rows (three tiles) are processed at a time: their scores stay in L1, and the chunk stays in L2 for
 * all rows of the unit. Keys are processed two columns at a time, as a tile multiplies 32 of their values. */
#define TILED_ROWS (3 * TILE_ROWS)
#define MAX_STEPS 16   /* of 32 components of a key: 512 in all */
#define MAX_SUBUNITS 8 /* of 48 rows: keys and values are read from memory once for all of them */

/* The scratch space of a thread. It has the scores of one subunit, and everything else for all rows of a unit. */
typedef struct {
    f32x *denominator;
    float *running_max, *scores, *accumulators;
    char *queries, *tail;
    int tile_rows; /* current configuration of the registers; 0: none */
} tiled_scratch;

static inline int tokens_of_subunit(const attention_args *a) {
    int group = group_of(a);
    return group < TILED_ROWS ? TILED_ROWS / group : 1;
}

static inline int fits_matrix_tiles(const layer_args *l) {
    return matrix_tiles_enabled && kind_of_cache(l) == PAIRS && l->k_dim % TILE_INPUTS == 0 &&
           l->k_dim <= MAX_STEPS * TILE_INPUTS && l->block_size % TILE_INPUTS == 0 &&
           l->num_heads / l->num_kv_heads <= TILED_ROWS;
}

/* Returns the size of the scratch space in floats. Sets its pointers if `memory`, aligned to a cache line, is given. */
static int64_t divide_scratch(const attention_args *a, int subunits, float *memory, tiled_scratch *s) {
    int64_t rows = (int64_t)subunits * TILED_ROWS, v_stride = padded(a->layer.v_dim);
    s->denominator = (f32x *)memory;
    s->scores = memory + rows * LANES;
    s->accumulators = s->scores + TILED_ROWS * CHUNK * LANES;
    s->tail = (char *)(s->accumulators + rows * v_stride);
    s->queries = s->tail + 4 * TILE_ROWS * v_stride;
    s->running_max = (float *)(s->queries + rows * a->layer.k_dim * 2);
    return s->running_max + rows - memory;
}

#if HAS_MATRIX_TILES
/* Packs queries to [tiles of rows][k_dim / 32][16 rows][32], with zeros from row `rows` to row `filled`. */
static void pack_query_tiles(const attention_args *a, const unit *u, char *target, int first, int rows, int filled) {
    int group = group_of(a);
    int64_t tile_bytes = (int64_t)a->layer.k_dim * 2 * TILE_ROWS;
    for (int row = 0; row < filled; row++) {
        char *place = target + row / TILE_ROWS * tile_bytes + row % TILE_ROWS * TILE_BYTES;
        const uint16_t *query = (const uint16_t *)a->step.query + token_of(u, group, first + row) * a->step.query_token_stride +
                                head_of(u, group, first + row) * a->step.query_head_stride;
        for (int d = 0; d < a->layer.k_dim; d += TILE_INPUTS, place += TILE_ROWS * TILE_BYTES)
            if (row < rows) memcpy(place, query + d, TILE_BYTES);
            else memset(place, 0, TILE_BYTES);
    }
}

/* The left operand of a product: tiles of rows. */
typedef struct {
    const char *first;
    int64_t row, tile, step; /* strides in bytes */
} tiled_rows;

/* What each step prefetches: 16 rows of two cache lines, or 8 rows if there is only one column. */
typedef struct {
    const char *steps[MAX_STEPS]; /* NULL: nothing */
    int64_t row;
} prefetch_rows;

/* Prefetches a quarter of the rows of a step. All rows at once would delay the loads for the next product. */
static inline __attribute__((always_inline)) void prefetch_quarter(const prefetch_rows *ahead, int step, int quarter) {
    const char *first = ahead->steps[step];
    if (!first) return;
    for (int row = quarter * TILE_ROWS / 4; row < (quarter + 1) * TILE_ROWS / 4; row++) {
        __builtin_prefetch(first + row * ahead->row, 0, 2);
        __builtin_prefetch(first + row * ahead->row + LINE, 0, 2);
    }
}

/* sums[tiles of rows][columns * 16] (+)= x . w, in steps of 32. The columns of w are adjacent. */
static inline __attribute__((always_inline)) void
tile_products(const tiled_rows *x, const char *const *w, int64_t w_row, int steps, float *sums, int64_t sums_row, int adds,
              const prefetch_rows *ahead, int tiles, int columns) {
    float *second = sums + TILE_ROWS * sums_row / 4, *third = second + TILE_ROWS * sums_row / 4;
#define EACH_SUM(DO)                                  \
    DO(0, sums);                                      \
    if (columns > 1) DO(1, sums + LANES);             \
    if (tiles > 1) DO(2, second);                     \
    if (tiles > 1 && columns > 1) DO(3, second + LANES); \
    if (tiles > 2) DO(4, third);                      \
    if (tiles > 2 && columns > 1) DO(5, third + LANES);
#define BEGIN_SUM(TILE, PLACE)                     \
    do {                                           \
        if (adds) _tile_loadd(TILE, PLACE, sums_row); \
        else _tile_zero(TILE);                     \
    } while (0)
#define STORE_SUM(TILE, PLACE) _tile_stored(TILE, PLACE, sums_row)
    EACH_SUM(BEGIN_SUM)
    const char *rows = x->first;
    for (int step = 0; step < steps; step++, rows += x->step) {
        _tile_loadd(6, rows, x->row);
        prefetch_quarter(ahead, step, 0);
        _tile_loadd(WEIGHT_TILE, w[step], w_row);
        prefetch_quarter(ahead, step, 1);
        _tile_dpbf16ps(0, 6, WEIGHT_TILE);
        if (columns > 1) {
            _tile_loadd(WEIGHT_TILE, w[step] + TILE_BYTES, w_row);
            prefetch_quarter(ahead, step, 2);
            _tile_dpbf16ps(1, 6, WEIGHT_TILE);
            prefetch_quarter(ahead, step, 3);
        }
        if (tiles > 1) {
            _tile_loadd(6, rows + x->tile, x->row);
            if (columns > 1) {
                _tile_dpbf16ps(3, 6, WEIGHT_TILE);
                _tile_loadd(WEIGHT_TILE, w[step], w_row);
            }
            _tile_dpbf16ps(2, 6, WEIGHT_TILE);
        }
        if (tiles > 2) {
            _tile_loadd(6, rows + 2 * x->tile, x->row);
            _tile_dpbf16ps(4, 6, WEIGHT_TILE);
            if (columns > 1) {
                _tile_loadd(WEIGHT_TILE, w[step] + TILE_BYTES, w_row);
                _tile_dpbf16ps(5, 6, WEIGHT_TILE);
            }
        }
    }
    EACH_SUM(STORE_SUM)
}

/* Calls tile_products with tiles and columns as constants. */
#define TILE_PRODUCTS(COLUMNS, ...)                           \
    (tiles == 1   ? tile_products(__VA_ARGS__, 1, COLUMNS)    \
     : tiles == 2 ? tile_products(__VA_ARGS__, 2, COLUMNS)    \
                  : tile_products(__VA_ARGS__, 3, COLUMNS))

/* scores[tiles of rows][keys of the chunk] = queries . keys */
static __attribute__((noinline)) void
score_chunk_by_tiles(const attention_args *a, const char *queries, const chunk *now, const chunk *next, float *scores, int tiles) {
    int64_t key_row = (int64_t)a->layer.block_size * 4;
    int pairs = a->layer.k_dim / 2, steps = pairs / TILE_ROWS;
    tiled_rows x = {queries, TILE_BYTES, (int64_t)steps * TILE_ROWS * TILE_BYTES, TILE_ROWS * TILE_BYTES};
    const char *keys[MAX_STEPS];
    prefetch_rows ahead = {.row = key_row};
    compiler_barrier();
    for (int c = 0; c < now->num_columns; c += 2) {
        for (int step = 0; step < steps; step++) {
            keys[step] = now->k[c] + step * TILE_ROWS * key_row;
            if (next) ahead.steps[step] = next->k[c] + step * TILE_ROWS * key_row;
        }
        TILE_PRODUCTS(2, &x, keys, key_row, steps, scores + c * LANES, CHUNK * LANES * 4, 0, &ahead);
    }
    compiler_barrier();
}

/* accumulators[tiles of rows][v_dim] += weights . values of the chunk */
static __attribute__((noinline)) void
accumulate_chunk_by_tiles(const attention_args *a, const float *weights, const chunk *now, const char *tail, const chunk *next,
                          float *accumulators, int tiles) {
    int64_t value_row = padded(a->layer.v_dim) * 4;
    int groups = now->num_columns / 2;
    const int64_t row = CHUNK * LANES * 4;
    tiled_rows x = {(const char *)weights, row, TILE_ROWS * row, TILE_BYTES};
    const char *values[CHUNK / 2];
    prefetch_rows ahead = {.row = 2 * LINE}; /* in the order of memory, as many as are multiplied */
    compiler_barrier();
    for (int at = 0, columns; at < value_row; at += columns * TILE_BYTES) {
        columns = at + TILE_BYTES < value_row ? 2 : 1;
        for (int group = 0; group < groups; group++) {
            values[group] = (tail && group == groups - 1 ? tail : now->v[2 * group]) + at;
            if (next) ahead.steps[group] = next->v[2 * group] + at * TILE_ROWS;
        }
        if (columns == 2) TILE_PRODUCTS(2, &x, values, value_row, groups, accumulators + at / 4, value_row, 1, &ahead);
        else TILE_PRODUCTS(1, &x, values, value_row, groups, accumulators + at / 4, value_row, 1, &ahead);
    }
    compiler_barrier();
}

/* Copies the last 32 values of a unit, with zeros in the slots that are not filled. */
static const char *copy_tail(const attention_args *a, const chunk *now, int num_keys, char *tail) {
    int row_bytes = padded(a->layer.v_dim) * 4, left = num_keys % TILE_INPUTS;
    const char *values = now->v[num_keys / TILE_INPUTS * 2];
    memset(tail, 0, TILE_ROWS * row_bytes);
    memcpy(tail, values, left / 2 * row_bytes);
    if (left % 2)
        for (int at = left / 2 * row_bytes, end = at + row_bytes; at < end; at += 4)
            copy_pair(tail + at, (const uint16_t *)(values + at), 0, 1);
    return tail;
}

/* Rows of a unit that are multiplied at once, and their scratch space. */
typedef struct {
    int first, rows, tiles;
    const char *queries;
    float *accumulators;
} subunit;

static inline subunit subunit_of(const attention_args *a, const unit *u, const tiled_scratch *s, int number) {
    int group = group_of(a), step = tokens_of_subunit(a) * group;
    int rows = min(step, u->num_tokens * group - number * step);
    return (subunit){number * step, rows, (rows + TILE_ROWS - 1) / TILE_ROWS,
                     s->queries + (int64_t)number * TILED_ROWS * a->layer.k_dim * 2,
                     s->accumulators + (int64_t)number * TILED_ROWS * padded(a->layer.v_dim)};
}

static void attend_by_matrix_tiles(const attention_args *a, const unit *u, const unit *upcoming, cursor *ahead, tiled_scratch *s) {
    int group = group_of(a), v_stride = padded(a->layer.v_dim), tokens = tokens_of_subunit(a);
    int position = first_position(a, u), total_keys = keys_of(a, u), count = (u->num_tokens + tokens - 1) / tokens;
    begin_rows(a, u, u->num_tokens * group, s->running_max, s->denominator);
    int tile_rows = min(u->num_tokens * group, TILE_ROWS); /* if one tile is enough, unused rows cost no time */
    if (s->tile_rows != tile_rows) begin_matrix_tiles(tile_rows);
    s->tile_rows = tile_rows;
    for (int number = 0; number < count; number++) {
        const subunit part = subunit_of(a, u, s, number);
        int filled = (part.rows + tile_rows - 1) / tile_rows * tile_rows;
        pack_query_tiles(a, u, (char *)part.queries, part.first, part.rows, filled);
        memset(part.accumulators, 0, sizeof(float) * filled * v_stride);
    }
    for (cursor w = begin(a, u, oldest_column(a, u)); w.column < w.end;) {
        const chunk now = next_chunk(a, &w, PAIRS), next = locate_prefetch(a, &now, ahead, &upcoming, PAIRS);
        int first_key = now.first_column * LANES, num_keys = total_keys - first_key;
        const char *tail = num_keys < now.num_columns * LANES ? copy_tail(a, &now, num_keys, s->tail) : NULL;
        int skips = first_key > position && !a->layer.both_ways; /* the chunk is masked for all subunits before `first` */
        int first = skips ? (first_key - position) / tokens : 0;
        for (int number = first; number < count; number++) {
            const subunit part = subunit_of(a, u, s, number);
            const chunk *prefetched = number == first ? &next : NULL;
            score_chunk_by_tiles(a, part.queries, &now, prefetched, s->scores, part.tiles);
            softmax_rows(a, s->scores, first_key, now.num_columns, position + part.first / group, total_keys,
                         part.rows, s->running_max + part.first, s->denominator + part.first, part.accumulators, PAIRS);
            accumulate_chunk_by_tiles(a, s->scores, &now, tail, prefetched, part.accumulators, part.tiles);
        }
    }
    for (int number = 0; number < count; number++) {
        const subunit part = subunit_of(a, u, s, number);
        for (int row = 0; row < part.rows; row++)
            finish_output(a, u, part.first + row, part.accumulators + row * v_stride, s->denominator[part.first + row], BFLOAT16);
    }
}
#else
static void attend_by_matrix_tiles(const attention_args *a, const unit *u, const unit *upcoming, cursor *ahead, tiled_scratch *s) {
    (void)a, (void)u, (void)upcoming, (void)ahead, (void)s;
}
#endif
