/* The online softmax: replaces the scores of a chunk of keys with weights. Include after attention_args and CHUNK are defined.
 *
 * For each row it keeps the running maximum of the scores, the denominator (the sum of all weights so far) and the
 * accumulators (the weighted sums of values). */

#define MASKED (-1e30f)      /* finite, and below every visible score */
#define MAX_SLACK 8.0f       /* the running maximum rises only for a score this much above it: weights stay below 2^8 */
#define INITIAL_MAX (-1e20f) /* the scores of a chunk that is masked completely stay below it, so their weights are 0 */

static inline float max_lanes(f32x v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float largest[LANES];
    memcpy(largest, &v, sizeof largest);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) largest[i] = largest[i] > largest[i + half] ? largest[i] : largest[i + half];
    return largest[0];
}

static inline int any_above(f32x v, float bound) {
#ifdef __AVX512F__ /* two instructions instead of twelve */
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#endif
    return max_lanes(v) > bound;
}

static inline f32x tanh_vector(f32x x) {
    x = -max_vector(broadcast(-40.0f), -x); /* avoids an overflow: tanh is 1 for any x above 9 */
    return 1.0f - 2.0f / (power_of_two(x * (2.0f * LOG2_E)) + 1.0f);
}

/* Replaces the scores of LANES keys with weights. */
static inline f32x exponentiate_column(float *scores, int column, float running_max) {
    f32x weights = power_of_two(*(f32x *)(scores + column * LANES) - running_max);
    *(f32x *)(scores + column * LANES) = weights;
    return weights;
}

#if HAS_PAIRS
/* Replaces the unscaled scores of a column, the next one, or both with weights in bfloat16. Adds the rounded weights to the
 * denominators, so that they are exactly the sums of the weights that the values are multiplied with. */
static inline void exponentiate_pairs(float *scores, int column, int has_first, int has_second, float running_max, float scale,
                                      f32x denominators[2]) {
    f32x first = {0}, second = {0};
    if (has_first) first = power_of_two_rough(*(f32x *)(scores + column * LANES) * scale - running_max);
    if (has_second) second = power_of_two_rough(*(f32x *)(scores + (column + 1) * LANES) * scale - running_max);
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    uint16_t *target = (uint16_t *)scores + column * LANES;
    if (has_first && has_second) memcpy(target, &rounded, sizeof rounded);
    else if (has_first) memcpy(target, &rounded, sizeof rounded / 2);
    else memcpy(target + LANES, (char *)&rounded + sizeof rounded / 2, sizeof rounded / 2);
    denominators[0] += (f32x)_mm512_slli_epi32(rounded, 16);
    denominators[1] += (f32x)_mm512_and_epi32(rounded, _mm512_set1_epi32((int)0xffff0000u));
}
#endif

/* The factor that turns products into base 2 logarithms of weights. Capped scores get LOG2_E after the cap. For PAIRS, scores
 * are scaled instead of queries. */
static inline float query_scale(const attention_args *a) {
    return a->layer.softcap > 0 ? a->layer.scale : a->layer.scale * LOG2_E;
}

/* The factor of scores when they become weights. */
static inline float later_scale(const attention_args *a, int kind) {
    return kind == PAIRS && !(a->layer.softcap > 0) ? query_scale(a) : 1.0f;
}

/* Rescales the denominator and the accumulators of a row to a new running maximum. Does nothing for a score that is only a little
 * larger: weights above 1 are summed as exactly, and a branch that is rarely taken costs nothing. */
static inline __attribute__((always_inline)) void
raise_running_max(f32x found, float *running_max, f32x *denominator, float *accumulators, int v_stride) {
    if (!any_above(found, *running_max + MAX_SLACK)) return;
    float new_max = max_lanes(found);
    f32x shrink = power_of_two(broadcast(*running_max - new_max));
    *denominator *= shrink;
    for (int d = 0; d < v_stride; d += LANES) *(f32x *)(accumulators + d) *= shrink;
    *running_max = new_max;
}

/* Returns the oldest key that is visible from a position. */
static inline int oldest_key(const attention_args *a, int position) {
    return a->layer.window > 0 ? position - a->layer.window + 1 : 0;
}

/* Returns the newest key that is visible from a position, of the `total_keys` that the unit may see. */
static inline int newest_key(const attention_args *a, int position, int total_keys) {
    if (!a->layer.both_ways) return position;
    int newest = total_keys - 1;
    return a->layer.window > 0 && position + a->layer.window - 1 < newest ? position + a->layer.window - 1 : newest;
}

/* Caps and masks the scores of one row. Returns the maximum of each lane. */
static inline __attribute__((always_inline)) f32x
finish_scores(const attention_args *a, float *scores, int num_columns, int first_key, int position, int total_keys, int kind) {
    i32x lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    int oldest = oldest_key(a, position), newest = newest_key(a, position, total_keys);
    f32x largest = broadcast(MASKED);
    for (int c = 0; c < num_columns; c++) {
        f32x s = *(f32x *)(scores + c * LANES);
        float softcap = a->layer.softcap;
        if (softcap > 0) s = tanh_vector((kind == PAIRS ? s * a->layer.scale : s) / softcap) * (softcap * LOG2_E);
        i32x key = lanes + (first_key + c * LANES);
        s = select_vector((key >= oldest) & (key <= newest), s, broadcast(MASKED));
        *(f32x *)(scores + c * LANES) = s;
        largest = max_vector(s, largest);
    }
    return largest;
}

/* Returns the maximum of each lane for a row that sees the whole chunk. Its scores stay as they are. */
static inline f32x largest_scores(const float *scores, int num_columns) {
    f32x largest[2] = {*(f32x *)scores, *(f32x *)scores}; /* two chains of dependent instructions */
    for (int c = 1; c < num_columns; c++) largest[c % 2] = max_vector(*(f32x *)(scores + c * LANES), largest[c % 2]);
    return max_vector(largest[0], largest[1]);
}

/* Replaces the scores of all rows with weights. Without a branch between rows, the processor overlaps them. Even and odd columns
 * have a partial sum each, counted from the first key of the sequence: the result does not depend on where the chunk begins. */
static inline __attribute__((always_inline)) void
exponentiate_chunk(const attention_args *a, float *scores, int first_key, int num_columns, const float *running_max,
                   f32x *denominator, int rows, int kind) {
    int turn = first_key / LANES % 2;
    for (int row = 0; row < rows; row++) {
        f32x sums[2] = {denominator[row], {0}};
        float *own = scores + row * CHUNK * LANES;
        for (int c = -turn; c < num_columns; c += 2) {
            int has_first = c >= 0, has_second = c + 1 < num_columns;
#if HAS_PAIRS
            if (kind == PAIRS) exponentiate_pairs(own, c, has_first, has_second, running_max[row], later_scale(a, kind), sums);
#endif
            if (kind != PAIRS && has_first) sums[0] += exponentiate_column(own, c, running_max[row]);
            if (kind != PAIRS && has_second) sums[1] += exponentiate_column(own, c + 1, running_max[row]);
        }
        denominator[row] = sums[0] + sums[1];
    }
}

/* Runs the softmax over a chunk. The first row belongs to the token at `position`. */
static inline __attribute__((always_inline)) void
softmax_rows(const attention_args *a, float *scores, int first_key, int num_columns, int position, int total_keys, int rows,
             float *running_max, f32x *denominator, float *accumulators, int kind) {
    int group = group_of(a), v_stride = padded(a->layer.v_dim), last_key = first_key + num_columns * LANES - 1;
    int whole = first_key >= oldest_key(a, position + (rows - 1) / group) && last_key <= newest_key(a, position, total_keys) &&
                !(a->layer.softcap > 0);
    for (int row = 0; row < rows; row++) {
        float *own = scores + row * CHUNK * LANES;
        f32x found = whole ? largest_scores(own, num_columns)
                           : finish_scores(a, own, num_columns, first_key, position + row / group, total_keys, kind);
        raise_running_max(found * later_scale(a, kind), running_max + row, denominator + row, accumulators + row * v_stride,
                          v_stride);
    }
    exponentiate_chunk(a, scores, first_key, num_columns, running_max, denominator, rows, kind);
}
