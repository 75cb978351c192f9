/* Scores of a chunk of keys become weights. After attention_args and its constants. */

#define MASKED (-1e30f)       /* finite, and below all that is seen */
#define SLACK 8.0f            /* logarithm to base 2 of the most that a weight can be before its row's maximum is raised */
#define NOTHING_SEEN (-1e20f) /* a row's first maximum: a chunk that is masked for it wholly does not raise it and weighs nothing */

static inline float max_lanes(f32x v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float most[LANES];
    memcpy(most, &v, sizeof most);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) most[i] = most[i] > most[i + half] ? most[i] : most[i + half];
    return most[0];
}

static inline int any_above(f32x v, float bound) {
#ifdef __AVX512F__ /* two instructions for a dozen */
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#endif
    return max_lanes(v) > bound;
}

static inline f32x tanh_vector(f32x x) {
    x = -max_vector(broadcast(-40.0f), -x); /* beyond 9 it is 1 */
    return 1.0f - 2.0f / (power_of_two(x * (2.0f * LOG2_E)) + 1.0f);
}

/* Weights of LANES keys take the place of their scores. */
static inline f32x soften_scores(float *scores, int column, float most) {
    f32x weights = power_of_two(*(f32x *)(scores + column * LANES) - most);
    *(f32x *)(scores + column * LANES) = weights;
    return weights;
}

#if HAS_PAIRS
/* The same of scores to be scaled, in bfloat16, as pairs are multiplied; of a column, the next one or both. Adds the
 * weights to totals as they are stored, so that what is divided by their sum is exactly what was weighted. */
static inline void soften_pairs(float *scores, int column, int has_first, int has_second, float most, float scale, f32x totals[2]) {
    f32x first = {0}, second = {0};
    if (has_first) first = power_of_two_rough(*(f32x *)(scores + column * LANES) * scale - most);
    if (has_second) second = power_of_two_rough(*(f32x *)(scores + (column + 1) * LANES) * scale - most);
    __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    uint16_t *target = (uint16_t *)scores + column * LANES;
    if (has_first && has_second) memcpy(target, &rounded, sizeof rounded);
    else if (has_first) memcpy(target, &rounded, sizeof rounded / 2);
    else memcpy(target + LANES, (char *)&rounded + sizeof rounded / 2, sizeof rounded / 2);
    totals[0] += (f32x)_mm512_slli_epi32(rounded, 16);
    totals[1] += (f32x)_mm512_and_epi32(rounded, _mm512_set1_epi32((int)0xffff0000u));
}
#endif

/* Makes products logarithms of weights to base 2; capped ones become it after the cap. Where pairs are multiplied, scores
 * are scaled instead of queries. */
static inline float query_scale(const attention_args *a) {
    return a->layer.softcap > 0 ? a->layer.scale : a->layer.scale * LOG2_E;
}

/* What scores are multiplied with when they become weights. */
static inline float later_scale(const attention_args *a, int kind) {
    return kind == PAIRS && !(a->layer.softcap > 0) ? query_scale(a) : 1.0f;
}

/* What a row has gathered so far is brought to a new maximum, but not for a little more: of larger weights the sum is as
 * exact, and a branch that is hardly ever taken costs nothing. */
static inline __attribute__((always_inline)) void
raise_most(f32x found, float *most, f32x *total, float *mixed, int v_stride) {
    if (!any_above(found, *most + SLACK)) return;
    float new_most = max_lanes(found);
    f32x shrink = power_of_two(broadcast(*most - new_most));
    *total *= shrink;
    for (int d = 0; d < v_stride; d += LANES) *(f32x *)(mixed + d) *= shrink;
    *most = new_most;
}

/* The oldest key that is seen from a position. */
static inline int oldest_key(const attention_args *a, int position) {
    return a->layer.window > 0 ? position - a->layer.window + 1 : 0;
}

/* One row's scores of a chunk as the softmax takes them. Returns each lane's maximum. */
static inline __attribute__((always_inline)) f32x
finish_scores(const attention_args *a, float *scores, int num_columns, int first_key, int position, int kind) {
    i32x lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    int oldest = oldest_key(a, position);
    f32x most = broadcast(MASKED);
    for (int c = 0; c < num_columns; c++) {
        f32x s = *(f32x *)(scores + c * LANES);
        if (a->layer.softcap > 0) s = tanh_vector((kind == PAIRS ? s * a->layer.scale : s) / a->layer.softcap) * (a->layer.softcap * LOG2_E);
        i32x key = lanes + (first_key + c * LANES);
        s = select_vector((key >= oldest) & (key <= position), s, broadcast(MASKED));
        *(f32x *)(scores + c * LANES) = s;
        most = max_vector(s, most);
    }
    return most;
}

/* The same of a row that sees all of the chunk, where scores stay as they are. */
static inline f32x largest_scores(const float *scores, int num_columns) {
    f32x most[2] = {*(f32x *)scores, *(f32x *)scores}; /* one would wait for itself */
    for (int c = 1; c < num_columns; c++) most[c % 2] = max_vector(*(f32x *)(scores + c * LANES), most[c % 2]);
    return max_vector(most[0], most[1]);
}

/* All rows' scores of a chunk become weights: without a branch between rows the processor computes many at once. Columns
 * take turns, and each has the same one wherever the chunk begins. */
static inline __attribute__((always_inline)) void
soften(const attention_args *a, float *scores, int first_key, int num_columns, const float *most, f32x *total, int rows, int kind) {
    int turn = first_key / LANES % 2;
    for (int row = 0; row < rows; row++) {
        f32x sums[2] = {total[row], {0}};
        float *own = scores + row * CHUNK * LANES;
        for (int c = -turn; c < num_columns; c += 2) {
            int has_first = c >= 0, has_second = c + 1 < num_columns;
#if HAS_PAIRS
            if (kind == PAIRS) soften_pairs(own, c, has_first, has_second, most[row], later_scale(a, kind), sums);
#endif
            if (kind != PAIRS && has_first) sums[0] += soften_scores(own, c, most[row]);
            if (kind != PAIRS && has_second) sums[1] += soften_scores(own, c + 1, most[row]);
        }
        total[row] = sums[0] + sums[1];
    }
}

/* Scores of a chunk, of rows that begin with a token at `position`, become weights. */
static inline __attribute__((always_inline)) void
weigh_rows(const attention_args *a, float *scores, int first_key, int num_columns, int position, int rows, float *most,
           f32x *total, float *mixed, int kind) {
    int group = group_of(a), v_stride = padded(a->layer.v_dim), last_key = first_key + num_columns * LANES - 1;
    int whole = first_key >= oldest_key(a, position + (rows - 1) / group) && last_key <= position && !(a->layer.softcap > 0);
    for (int row = 0; row < rows; row++) {
        float *own = scores + row * CHUNK * LANES;
        f32x found = whole ? largest_scores(own, num_columns)
                           : finish_scores(a, own, num_columns, first_key, position + row / group, kind);
        raise_most(found * later_scale(a, kind), most + row, total + row, mixed + row * v_stride, v_stride);
    }
    soften(a, scores, first_key, num_columns, most, total, rows, kind);
}
