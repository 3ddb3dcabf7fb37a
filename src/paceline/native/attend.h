/* One split of attention for the queries of one KV head; part of lanes.h, compiled once per instruction set.
 *
 * Keys come in blocks of 64 at absolute multiples of 64, in each block 16 at a time, read and widened once for all queries. A query runs
 * over the blocks up to its own last key and over nothing else, so its result does not depend on the queries beside it nor on where the
 * pages lie. One maximum per block: a split is one block, and its sums are never scaled anew.
 * Online softmax: Milakov and Gimelshein 2018; splits over keys: Flash-Decoding.
 */
#ifndef PL_ATTEND_H
#define PL_ATTEND_H

#define ATTEND_KEYS 16  /* widened together */
#define ATTEND_BLOCK 64 /* keys of one maximum */

/* 16 keys (or values) from `first` on, the first `count` of them real, as float32 [16, head_dim]. */
static inline void attend_gather(const pl_attend *args, const uint16_t *memory, int64_t first, int32_t count, float *restrict out)
{
    const int32_t head_dim = args->head_dim, page_size = args->page_size;
    const int is_one_page = page_size % ATTEND_KEYS == 0;
    int64_t slot = (int64_t)args->pages[first / page_size] * page_size + first % page_size;
    for (int32_t j = 0; j < count; j++, slot++) {
        if (!is_one_page)
            slot = (int64_t)args->pages[(first + j) / page_size] * page_size + (first + j) % page_size;
        for (int32_t d = 0; d < head_dim; d += 16)
            lanes_store(out + j * head_dim + d, lanes_from_half(memory + slot * head_dim + d));
    }
}

/* Asks for keys (or values) first .. first + count - 1, which lie on pages all over the memory. */
static inline void attend_fetch(const pl_attend *args, const uint16_t *memory, int64_t first, int32_t count)
{
    const int32_t head_dim = args->head_dim, page_size = args->page_size;
    for (int64_t key = first; key < first + count; key++) {
        const uint16_t *from = memory + ((int64_t)args->pages[key / page_size] * page_size + key % page_size) * head_dim;
        for (int32_t d = 0; d < head_dim; d += 32)
            __builtin_prefetch(from + d);
    }
}

/* Products of one query with 16 keys; those from `count` on are minus infinity. */
static inline void attend_scores(const float *query, const float *keys, int32_t head_dim, int32_t count, float *out)
{
    for (int32_t j = 0; j < ATTEND_KEYS; j += 4) {
        lanes16 a = lanes_splat(0.0f), b = a, c = a, d = a;
        for (int32_t i = 0; i < head_dim; i += 16) {
            const lanes16 q = lanes_load(query + i);
            const float *k = keys + j * head_dim + i;
            a = lanes_add_mul(a, q, lanes_load(k));
            b = lanes_add_mul(b, q, lanes_load(k + head_dim));
            c = lanes_add_mul(c, q, lanes_load(k + 2 * head_dim));
            d = lanes_add_mul(d, q, lanes_load(k + 3 * head_dim));
        }
        const lanes4 sums = lanes_four_sums(a, b, c, d);
        memcpy(out + j, &sums, sizeof sums);
    }
    for (int32_t j = count; j < ATTEND_KEYS; j++)
        out[j] = -INFINITY;
}

/* out [head_dim] += the first `count` values weighted, key after key. */
static inline void attend_values(const float *weights, const float *values, int32_t head_dim, int32_t count, float *out)
{
    int32_t i = 0;
    for (; i + 32 <= head_dim; i += 32) {
        lanes16 a = lanes_load(out + i), b = lanes_load(out + i + 16);
        for (int32_t j = 0; j < count; j++) {
            const lanes16 w = lanes_splat(weights[j]);
            a = lanes_add_mul(a, w, lanes_load(values + j * head_dim + i));
            b = lanes_add_mul(b, w, lanes_load(values + j * head_dim + i + 16));
        }
        lanes_store(out + i, a);
        lanes_store(out + i + 16, b);
    }
    for (; i < head_dim; i += 16) {
        lanes16 a = lanes_load(out + i);
        for (int32_t j = 0; j < count; j++)
            a = lanes_add_mul(a, lanes_splat(weights[j]), lanes_load(values + j * head_dim + i));
        lanes_store(out + i, a);
    }
}

/* Scores of one query for a block, the first `count` filled up with minus infinity to whole lanes, become weights; what the query has from
 * the blocks before is scaled to the new maximum. */
static inline void attend_weights(const pl_attend *args, int32_t query, int32_t count, float *scores, float *total)
{
    lanes16 largest = lanes_load(scores), sum = lanes_load(total);
    for (int32_t j = ATTEND_KEYS; j < count; j += ATTEND_KEYS) {
        const lanes16 next = lanes_load(scores + j);
#define X(i)                                                                                                                     \
    {                                                                                                                            \
        const lanes_i is_larger = next.v[i] > largest.v[i];                                                                      \
        largest.v[i] = (lanes_f)((is_larger & (lanes_i)next.v[i]) | (~is_larger & (lanes_i)largest.v[i]));                       \
    }
        PL_EACH(X)
#undef X
    }
    const float before = args->maximum[query], block = lanes_max(largest), now = block > before ? block : before;
    if (now > before && before > -INFINITY) {
        const lanes16 factor = lanes_splat(lanes_exp(lanes_splat(before - now)).v[0][0]);
        float *out = args->out + query * args->head_dim;
        sum = lanes_mul(sum, factor);
        for (int32_t i = 0; i < args->head_dim; i += 16)
            lanes_store(out + i, lanes_mul(lanes_load(out + i), factor));
    }
    args->maximum[query] = now;
    for (int32_t j = 0; j < count; j += ATTEND_KEYS) {
        lanes16 weights = lanes_load(scores + j);
#define X(i) weights.v[i] = weights.v[i] - now;
        PL_EACH(X)
#undef X
        weights = lanes_exp(weights);
        lanes_store(scores + j, weights);
        sum = lanes_add(sum, weights);
    }
    lanes_store(total, sum);
}

/* How many of `count` keys from `first` on the query sees; 0 or less: none. */
static inline int32_t attend_visible(const pl_attend *args, int32_t query, int64_t first, int32_t count)
{
    const int64_t visible = args->limits[query] - first + 1;
    return visible < count ? (int32_t)visible : count;
}

static void lanes_attend(const pl_attend *args)
{
    const int32_t head_dim = args->head_dim, num_queries = args->num_queries;
    float widened[ATTEND_KEYS * PL_MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[PL_ATTEND_QUERIES][ATTEND_BLOCK] __attribute__((aligned(64)));
    float totals[PL_ATTEND_QUERIES][16] __attribute__((aligned(64)));
    memset(totals, 0, (size_t)num_queries * sizeof totals[0]);
    memset(args->out, 0, (size_t)num_queries * (size_t)head_dim * sizeof(float));
    memset(widened, 0, (size_t)(ATTEND_KEYS * head_dim) * sizeof(float)); /* products with rows that are not filled are thrown away */
    for (int32_t j = 0; j < num_queries; j++)
        args->maximum[j] = -INFINITY;
    for (int64_t block = args->first_key; block < args->end_key; block += ATTEND_BLOCK) {
        const int32_t filled = args->end_key - block < ATTEND_BLOCK ? (int32_t)(args->end_key - block) : ATTEND_BLOCK;
        attend_fetch(args, args->keys, block, filled);
        for (int32_t from = 0; from < filled; from += ATTEND_KEYS) {
            const int32_t count = filled - from < ATTEND_KEYS ? filled - from : ATTEND_KEYS;
            attend_fetch(args, args->values, block + from, count);
            attend_gather(args, args->keys, block + from, count, widened);
            for (int32_t j = 0; j < num_queries; j++) {
                const int32_t visible = attend_visible(args, j, block + from, count);
                if (visible > 0)
                    attend_scores(args->queries[j], widened, head_dim, visible, scores[j] + from);
            }
        }
        for (int32_t j = 0; j < num_queries; j++) {
            const int32_t visible = attend_visible(args, j, block, filled);
            if (visible > 0)
                attend_weights(args, j, visible, scores[j], totals[j]);
        }
        for (int32_t from = 0; from < filled; from += ATTEND_KEYS) {
            const int32_t count = filled - from < ATTEND_KEYS ? filled - from : ATTEND_KEYS;
            attend_gather(args, args->values, block + from, count, widened);
            for (int32_t j = 0; j < num_queries; j++) {
                const int32_t visible = attend_visible(args, j, block + from, count);
                if (visible > 0)
                    attend_values(scores[j] + from, widened, head_dim, visible, args->out + j * head_dim);
            }
        }
    }
    for (int32_t j = 0; j < num_queries; j++)
        args->total[j] = lanes_sum(lanes_load(totals[j]));
}

static void lanes_merge(pl_partial *into, const pl_partial *next, int32_t head_dim)
{
    const float maximum = next->maximum > into->maximum ? next->maximum : into->maximum;
    const lanes16 a = lanes_exp(lanes_splat(into->maximum - maximum)), b = lanes_exp(lanes_splat(next->maximum - maximum));
    into->maximum = maximum;
    into->total = into->total * a.v[0][0] + next->total * b.v[0][0];
    for (int32_t i = 0; i < head_dim; i += 16)
        lanes_store(into->out + i, lanes_add_mul(lanes_mul(lanes_load(into->out + i), a), lanes_load(next->out + i), b));
}

#endif
