/* One split of attention for the queries of one KV head; part of lanes.h, compiled once per instruction set.
 *
 * Keys come in blocks of 16 at absolute multiples of 16, read and widened once for all queries. A query runs over the blocks up to its
 * own last key and over nothing else, so its result does not depend on the queries beside it nor on where the pages lie.
 * Online softmax: Milakov and Gimelshein 2018; splits over keys: Flash-Decoding.
 */
#ifndef PL_ATTEND_H
#define PL_ATTEND_H

#define ATTEND_KEYS 16

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

/* out [head_dim] = out * factor + the first `count` values weighted, key after key. */
static inline void attend_values(const float *weights, const float *values, int32_t head_dim, int32_t count, float factor, float *out)
{
    int32_t i = 0;
    const lanes16 scale = lanes_splat(factor);
    for (; i + 32 <= head_dim; i += 32) {
        lanes16 a = lanes_mul(lanes_load(out + i), scale), b = lanes_mul(lanes_load(out + i + 16), scale);
        for (int32_t j = 0; j < count; j++) {
            const lanes16 w = lanes_splat(weights[j]);
            a = lanes_add_mul(a, w, lanes_load(values + j * head_dim + i));
            b = lanes_add_mul(b, w, lanes_load(values + j * head_dim + i + 16));
        }
        lanes_store(out + i, a);
        lanes_store(out + i + 16, b);
    }
    for (; i < head_dim; i += 16) {
        lanes16 a = lanes_mul(lanes_load(out + i), scale);
        for (int32_t j = 0; j < count; j++)
            a = lanes_add_mul(a, lanes_splat(weights[j]), lanes_load(values + j * head_dim + i));
        lanes_store(out + i, a);
    }
}

static void lanes_attend(const pl_attend *args)
{
    const int32_t head_dim = args->head_dim, num_queries = args->num_queries;
    float keys[ATTEND_KEYS * PL_MAX_HEAD_DIM] __attribute__((aligned(64)));
    float values[ATTEND_KEYS * PL_MAX_HEAD_DIM] __attribute__((aligned(64)));
    float totals[PL_ATTEND_QUERIES][16] __attribute__((aligned(64)));
    memset(totals, 0, (size_t)num_queries * sizeof totals[0]);
    memset(args->out, 0, (size_t)num_queries * (size_t)head_dim * sizeof(float));
    memset(keys, 0, (size_t)(ATTEND_KEYS * head_dim) * sizeof(float)); /* products with rows that are not filled are thrown away */
    for (int32_t j = 0; j < num_queries; j++)
        args->maximum[j] = -INFINITY;
    for (int64_t first = args->first_key; first < args->end_key; first += ATTEND_KEYS) {
        const int64_t left = args->end_key - first;
        const int32_t filled = left < ATTEND_KEYS ? (int32_t)left : ATTEND_KEYS;
        attend_gather(args, args->keys, first, filled, keys);
        attend_gather(args, args->values, first, filled, values);
        for (int32_t j = 0; j < num_queries; j++) {
            const int64_t visible = args->limits[j] - first + 1;
            if (visible <= 0)
                continue;
            const int32_t count = visible < filled ? (int32_t)visible : filled;
            float scores[ATTEND_KEYS] __attribute__((aligned(64)));
            attend_scores(args->queries[j], keys, head_dim, count, scores);
            const float before = args->maximum[j], block = lanes_max(lanes_load(scores));
            const float now = block > before ? block : before;
            float factor = 1.0f;
            lanes16 weights = lanes_load(scores), total = lanes_load(totals[j]);
#define X(i) weights.v[i] = weights.v[i] - now;
            PL_EACH(X)
#undef X
            weights = lanes_exp(weights);
            if (now > before) {
                factor = lanes_exp(lanes_splat(before - now)).v[0][0];
                total = lanes_mul(total, lanes_splat(factor));
            }
            lanes_store(totals[j], lanes_add(total, weights));
            lanes_store(scores, weights);
            args->maximum[j] = now;
            attend_values(scores, values, head_dim, count, factor, args->out + j * head_dim);
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
