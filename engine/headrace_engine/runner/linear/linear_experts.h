/* A mixture of experts: each token goes through the gated products of the experts that the router chose for it, and their results
 * are added with the router's weights.
 *
 * The pairs of token and expert are sorted by expert. All experts with rows are one product: first all rows are packed, then the
 * threads claim panels of all experts. The sum of a token is in the order of its choices. So the result of a token depends neither
 * on other tokens nor on the number of threads.
 */
#define EXPERT_PAIRS 4096 /* pairs that are computed at once: they limit the scratch space */
#define PANELS_A_CLAIM 8

typedef struct {
    linear_args gate_up, down; /* of the first expert; without rows, x and out */
    int64_t gate_up_bytes, down_bytes; /* of the weight of an expert */
    int32_t num_experts, num_chosen;
    int64_t tokens;
    const void *x;         /* [tokens][features] */
    const int64_t *chosen; /* [tokens][num_chosen]; numbers that are no expert add nothing */
    const float *weights;  /* [tokens][num_chosen] */
    void *out;             /* [tokens][features] */
} expert_args;

/* A product of one expert. */
typedef struct {
    linear_args a;
    division d;
    float *packed;
    int64_t first_tile, first_claim; /* among those of all experts */
} expert_product;

typedef struct {
    const expert_args *args;
    int64_t tokens, pairs, element; /* element: bytes */
    int32_t *place;   /* [tokens][num_chosen]: row of a pair, -1: none */
    int32_t *token;   /* [pairs]: of a row */
    int32_t *count;   /* [num_experts]: rows */
    char *rows, *gated, *results; /* [pairs][..] */
    float *packed;
    expert_product *products;
    int32_t num_products;
    int *claimed; /* one for each thread */
} expert_step;

/* Sorts the pairs of the tokens from `first` by expert. */
static void sort_pairs(expert_step *s, int64_t first) {
    const expert_args *e = s->args;
    const int64_t *chosen = e->chosen + first * e->num_chosen;
    int64_t all = s->tokens * e->num_chosen;
    memset(s->count, 0, sizeof(int32_t) * e->num_experts);
    for (int64_t i = 0; i < all; i++)
        if (chosen[i] >= 0 && chosen[i] < e->num_experts) s->count[chosen[i]]++;
    int32_t next[e->num_experts];
    s->pairs = 0;
    for (int expert = 0; expert < e->num_experts; expert++) next[expert] = (int32_t)s->pairs, s->pairs += s->count[expert];
    for (int64_t i = 0; i < all; i++) {
        int known = chosen[i] >= 0 && chosen[i] < e->num_experts;
        s->place[i] = known ? next[chosen[i]]++ : -1;
        if (known) s->token[s->place[i]] = (int32_t)(i / e->num_chosen);
    }
}

/* Floats of the packed rows of a product. */
static inline int64_t expert_floats(const division *d) { return d->tiles * d->tile_rows * d->row_floats; }

/* Lists the products of all experts with rows. */
static void list_products(expert_step *s, const linear_args *first, int64_t weight_bytes, char *x, char *out) {
    int64_t row = 0, tiles = 0, claims = 0;
    float *packed = s->packed;
    s->num_products = 0;
    for (int expert = 0; expert < s->args->num_experts; row += s->count[expert++]) {
        if (!s->count[expert]) continue;
        expert_product *p = s->products + s->num_products++;
        p->a = *first;
        p->a.rows = s->count[expert], p->a.x_stride = first->in_features, p->a.out_stride = width_of(first);
        p->a.x = x + row * p->a.x_stride * s->element, p->a.out = out + row * p->a.out_stride * s->element;
        p->a.weight = (const char *)first->weight + expert * weight_bytes;
        p->d = divide(&p->a);
        p->packed = packed, packed += expert_floats(&p->d);
        p->first_tile = tiles, tiles += p->d.tiles;
        p->first_claim = claims, claims += (p->d.panels + PANELS_A_CLAIM - 1) / PANELS_A_CLAIM;
    }
    s->products[s->num_products] = (expert_product){.first_tile = tiles, .first_claim = claims};
}

static void pack_expert_tile(const expert_product *p, int64_t tile) {
    if (by_tiles(&p->a)) pack_matrix_tile(&p->a, p->packed + tile * TILE_ROWS * p->d.row_floats, tile);
    else pack_vector_tile(&p->a, p->packed, p->d.tiles, 0, tile);
}

/* Multiplies all rows of a product with the panels from..to. */
static void multiply_expert(const expert_product *p, int from, int to, const char *behind) {
    for (int64_t block = 0; block < p->d.blocks; block++) {
        int64_t first = p->d.tiles * block / p->d.blocks, last = p->d.tiles * (block + 1) / p->d.blocks;
        int64_t row = by_tiles(&p->a) ? first * TILE_ROWS : tile_begin(p->a.rows, p->d.tiles, first);
        const float *packed = p->packed + row * p->d.row_floats;
        if (by_tiles(&p->a)) multiply_block_by_matrix_tiles(&p->a, packed, NULL, first, last, from, to, behind);
        else multiply_block_by_vectors(&p->a, packed, p->d.tiles, first, last, from, to, behind);
    }
}

/* Returns the product that claim (or tile) `index` belongs to, searching from `p` on. */
static inline const expert_product *product_of_claim(const expert_product *p, int64_t index) {
    while (p[1].first_claim <= index) p++;
    return p;
}

/* Packs and multiplies. The results are complete after the next barrier. */
static void multiply_experts(const expert_step *s, const member *m) {
    const expert_product *end = s->products + s->num_products;
    int64_t tiles = end->first_tile, claims = end->first_claim;
    const expert_product *p = s->products;
    for (int64_t tile = tiles * m->thread / m->threads; tile < tiles * (m->thread + 1) / m->threads; tile++) {
        while (p[1].first_tile <= tile) p++;
        pack_expert_tile(p, tile - p->first_tile);
    }
    s->claimed[m->thread] = 0;
    barrier(m);
    if (by_tiles(&s->products->a)) begin_matrix_tiles(TILE_ROWS);
    for (int i = 0; i < m->threads; i++) { /* its own claims first, then those of the others */
        int queue = (m->thread + i) % m->threads;
        int64_t begin = claims * queue / m->threads, last = claims * (queue + 1) / m->threads;
        p = s->products;
        for (int64_t claim; (claim = begin + claim_group(s->claimed + queue)) < last;) {
            p = product_of_claim(p, claim);
            int from = (int)(claim - p->first_claim) * PANELS_A_CLAIM, to = from + PANELS_A_CLAIM;
            const char *behind = to < p->d.panels ? panel_of(&p->a, to) : claim + 1 < last ? panel_of(&p[1].a, 0) : NULL;
            multiply_expert(p, from, to < p->d.panels ? to : p->d.panels, behind);
        }
    }
    if (by_tiles(&s->products->a)) end_matrix_tiles();
    barrier(m);
}

/* Adds the results of a token to out[features], which overwrites out. */
static void add_results(const expert_step *s, const float *weights, const int32_t *place, void *out) {
    int features = s->args->down.out_features, dtype = s->args->down.dtype;
    for (int at = 0; at < features; at += LANES) {
        int n = features - at < LANES ? features - at : LANES;
        f32x sum = {0};
        for (int i = 0; i < s->args->num_chosen; i++) {
            if (place[i] < 0) continue;
            int64_t from = (int64_t)place[i] * features + at;
            f32x value = {0};
            if (n == LANES) value = load_vector(s->results, from, dtype);
            else
                for (int j = 0; j < n; j++) value[j] = load_scalar(s->results, from + j, dtype);
            sum += value * weights[i];
        }
        if (n == LANES) store_vector(out, at, sum, dtype);
        else
            for (int j = 0; j < n; j++) store_scalar(out, at + j, sum[j], dtype);
    }
}

/* Computes `tokens` tokens from `first` on. All threads of a team call it. */
static void compute_experts(expert_step *s, int64_t first, const member *m) {
    const expert_args *e = s->args;
    int64_t features = e->gate_up.in_features, row_bytes = features * s->element;
    if (m->thread == 0) {
        sort_pairs(s, first);
        list_products(s, &e->gate_up, e->gate_up_bytes, s->rows, s->gated);
    }
    barrier(m);
    for (int64_t row = s->pairs * m->thread / m->threads; row < s->pairs * (m->thread + 1) / m->threads; row++)
        memcpy(s->rows + row * row_bytes, (const char *)e->x + (first + s->token[row]) * row_bytes, row_bytes);
    barrier(m);
    if (s->pairs) {
        multiply_experts(s, m);
        if (m->thread == 0) list_products(s, &e->down, e->down_bytes, s->gated, s->results);
        barrier(m);
        multiply_experts(s, m);
    }
    for (int64_t token = s->tokens * m->thread / m->threads; token < s->tokens * (m->thread + 1) / m->threads; token++) {
        const float *weights = e->weights + (first + token) * e->num_chosen;
        add_results(s, weights, s->place + token * e->num_chosen, (char *)e->out + (first + token) * row_bytes);
    }
    barrier(m);
}

/* Takes bytes of the scratch space. */
static void *take(char **scratch, int64_t bytes) {
    void *found = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return found;
}

/* Lays out the scratch space of a step at `memory`. Returns its bytes. */
static int64_t lay_out(expert_step *s, char *memory, int64_t max_tokens) {
    const expert_args *e = s->args;
    char *end = memory;
    int64_t pairs = max_tokens * e->num_chosen, experts = pairs < e->num_experts ? pairs : e->num_experts;
    linear_args gate_up = e->gate_up, down = e->down;
    gate_up.rows = down.rows = 1;
    division wide = divide(&gate_up), narrow = divide(&down);
    int64_t row_floats = wide.row_floats > narrow.row_floats ? wide.row_floats : narrow.row_floats;
    s->element = e->gate_up.dtype == FLOAT32 ? 4 : 2;
    s->place = take(&end, sizeof(int32_t) * pairs);
    s->token = take(&end, sizeof(int32_t) * pairs);
    s->count = take(&end, sizeof(int32_t) * e->num_experts);
    s->claimed = take(&end, sizeof(int) * e->gate_up.threads);
    s->products = take(&end, sizeof(expert_product) * (experts + 1));
    s->rows = take(&end, pairs * e->gate_up.in_features * s->element);
    s->gated = take(&end, pairs * e->down.in_features * s->element);
    s->results = take(&end, pairs * e->down.out_features * s->element);
    s->packed = take(&end, (pairs + experts * wide.tile_rows) * row_floats * (int64_t)sizeof(float));
    return end - memory;
}

/* Computes a mixture of experts. Returns 0, or -1 if there is no memory. */
int headrace_experts(const expert_args *e) {
    int64_t max_tokens = EXPERT_PAIRS / e->num_chosen;
    if (max_tokens < 1) max_tokens = 1;
    if (max_tokens > e->tokens) max_tokens = e->tokens;
    if (!max_tokens) return 0;
    expert_step s = {.args = e};
    float *memory = headrace_scratch(lay_out(&s, NULL, max_tokens) / (int64_t)sizeof(float));
    if (!memory) return -1;
    lay_out(&s, (char *)memory, max_tokens);
    team_slot slots[e->gate_up.threads];
    team all = {.slots = memset(slots, 0, sizeof slots), .spins = e->gate_up.spins};
#pragma omp parallel num_threads(e->gate_up.threads)
    {
        const member own = join_team(&all);
        for (int64_t first = 0; first < e->tokens; first += max_tokens) {
            if (own.thread == 0) s.tokens = e->tokens - first < max_tokens ? e->tokens - first : max_tokens;
            compute_experts(&s, first, &own);
        }
    }
    return 0;
}

EXPORT_LAYOUT(expert_args, FIELD(expert_args, gate_up), FIELD(expert_args, down), FIELD(expert_args, gate_up_bytes),
              FIELD(expert_args, down_bytes), FIELD(expert_args, num_experts), FIELD(expert_args, num_chosen),
              FIELD(expert_args, tokens), FIELD(expert_args, x), FIELD(expert_args, chosen), FIELD(expert_args, weights),
              FIELD(expert_args, out));
