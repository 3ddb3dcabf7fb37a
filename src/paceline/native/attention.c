/* Paged attention of a ragged batch: which query tokens attend together, to which keys, and how splits of keys become one result.
 *
 * A query's keys are cut at absolute multiples of PL_SPLIT_KEYS and the cuts merged in their order, always. Whether they are computed by
 * one task or by several at once depends on the batch, and shows nowhere in the result.
 */
#include <stdlib.h>

#include "program.h"

#define BLOCK_QUERIES 16    /* query tokens of one row that share the reading of keys */
#define TASKS_PER_THREAD 4  /* fewer than that without splitting: then split */

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t block_tokens(const pl_shape *shape)
{
    return smaller(BLOCK_QUERIES, PL_ATTEND_QUERIES / (shape->num_heads / shape->num_kv_heads));
}

static int32_t row_tokens(const pl_batch *batch, int32_t row)
{
    return batch->query_start[row + 1] - batch->query_start[row];
}

/* The last key that token `index` of the row sees: itself. */
static int64_t last_key(const pl_batch *batch, int32_t row, int32_t index)
{
    return (int64_t)batch->kv_lens[row] - row_tokens(batch, row) + index;
}

static int32_t num_splits(int64_t key)
{
    return (int32_t)(key / PL_SPLIT_KEYS) + 1;
}

static int32_t grow(attend_plan *plan, int32_t num_items, int64_t num_partials, int32_t head_dim)
{
    if (num_items > plan->max_items) {
        attend_item *items = realloc(plan->items, (size_t)num_items * sizeof *items);
        if (!items)
            return -1;
        plan->items = items;
        plan->max_items = num_items;
    }
    if (num_partials > plan->max_partials) {
        free(plan->partials);
        free(plan->partial_values);
        plan->partials = malloc((size_t)num_partials * sizeof *plan->partials);
        plan->partial_values = aligned_alloc(64, (size_t)num_partials * (size_t)head_dim * sizeof(float));
        plan->max_partials = plan->partials && plan->partial_values ? num_partials : 0;
        for (int64_t i = 0; i < plan->max_partials; i++)
            plan->partials[i].out = plan->partial_values + i * head_dim;
        return plan->max_partials ? 0 : -1;
    }
    return 0;
}

/* Items and partial results of one row, split or not; written only where `plan` is given. */
static void add_row(const pl_model *model, int32_t row, int32_t is_split, attend_plan *plan, int32_t *num_items, int64_t *num_partials)
{
    const pl_batch *batch = model->batch;
    const int32_t num_tokens = row_tokens(batch, row), block = block_tokens(&model->shape);
    /* The last tokens see most keys, and the last split is a part: the long tasks come first in every thread's stretch of them. */
    for (int32_t first = (num_tokens - 1) / block * block; first >= 0 && num_tokens > 0; first -= block) {
        const int32_t count = smaller(block, num_tokens - first), splits = num_splits(last_key(batch, row, first + count - 1));
        const int32_t step = is_split ? 1 : splits, token = batch->query_start[row] + first;
        for (int32_t split = 0; split < splits; split += step, ++*num_items)
            if (plan)
                plan->items[*num_items] = (attend_item){row, token, count, split, split + step};
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        const int32_t token = batch->query_start[row] + i;
        if (plan) {
            plan->first_partial[token] = is_split ? *num_partials : -1;
            if (is_split)
                plan->split_tokens[plan->num_split_tokens++] = (split_token){token, num_splits(last_key(batch, row, i))};
        }
        if (is_split)
            *num_partials += (int64_t)num_splits(last_key(batch, row, i)) * model->shape.num_heads;
    }
}

int32_t plan_attention(pl_model *model, int32_t num_threads)
{
    const pl_batch *batch = model->batch;
    attend_plan *plan = &model->plan;
    int32_t num_items = 0;
    int64_t num_partials = 0;
    for (int32_t row = 0; row < batch->num_rows; row++)
        add_row(model, row, 0, NULL, &num_items, &num_partials);
    const int32_t may_split = num_threads > 1 && num_items * model->shape.num_kv_heads < TASKS_PER_THREAD * num_threads;
    for (int32_t pass = 0; pass < 2; pass++) { /* first the sizes, then the plan */
        num_items = 0;
        num_partials = 0;
        plan->num_split_tokens = 0;
        for (int32_t row = 0; row < batch->num_rows; row++) {
            const int32_t is_split = may_split && row_tokens(batch, row) > 0 && batch->kv_lens[row] > PL_SPLIT_KEYS;
            add_row(model, row, is_split, pass ? plan : NULL, &num_items, &num_partials);
        }
        if (pass == 0 && grow(plan, num_items, num_partials, model->shape.head_dim) != 0)
            return -1;
    }
    plan->num_items = num_items;
    return 0;
}

/* out / total as the inputs of the next product. `group` heads of one token, one after the other in `heads`. */
static void finish(const pl_model *model, int32_t token, int32_t first_head, int32_t group, const pl_partial *heads)
{
    const int32_t head_dim = model->shape.head_dim, width = group * head_dim, first = first_head * head_dim;
    const pl_acts *acts = &model->mixed;
    float *mixed = model->attended + (int64_t)token * acts->k + first;
    for (int32_t h = 0; h < group; h++) {
        const float factor = 1.0f / heads[h].total;
        for (int32_t i = 0; i < head_dim; i++)
            mixed[h * head_dim + i] = heads[h].out[i] * factor;
    }
    pl_quantise_groups(model->kernels, mixed, width, acts, token, first / PL_GROUP);
}

/* One split for the last `num_tokens` tokens of an item; results by query, token after token. */
static void attend_split(const pl_model *model, const stage *self, const attend_item *item, int32_t kv_head, int32_t split, pl_attend *args)
{
    const pl_shape *shape = &model->shape;
    const pl_batch *batch = model->batch;
    const int32_t group = shape->num_heads / shape->num_kv_heads, head_dim = shape->head_dim;
    const int64_t width = (int64_t)(shape->num_heads + 2 * shape->num_kv_heads) * head_dim;
    const int64_t plane = model->kv.num_slots * head_dim, planes = (int64_t)self->op->layer * 2 * shape->num_kv_heads + kv_head;
    const float *queries[PL_ATTEND_QUERIES];
    int64_t limits[PL_ATTEND_QUERIES];
    const int32_t end = item->first_token + item->num_tokens, first = end - args->num_queries / group;
    for (int32_t i = 0; i < args->num_queries; i++) {
        const int32_t token = first + i / group;
        queries[i] = model->qkv + token * width + (kv_head * group + i % group) * head_dim;
        limits[i] = last_key(batch, item->row, token - batch->query_start[item->row]);
    }
    const int64_t end_key = limits[args->num_queries - 1] + 1;
    args->queries = queries;
    args->limits = limits;
    args->keys = model->kv.data + planes * plane;
    args->values = args->keys + shape->num_kv_heads * plane;
    args->pages = batch->page_ids + batch->page_start[item->row];
    args->page_size = batch->page_size;
    args->head_dim = head_dim;
    args->first_key = (int64_t)split * PL_SPLIT_KEYS;
    args->end_key = end_key < args->first_key + PL_SPLIT_KEYS ? end_key : args->first_key + PL_SPLIT_KEYS;
    model->kernels->attend(args);
}

/* How many of the item's tokens, the last ones, see keys of `split`. */
static int32_t num_seeing(const pl_model *model, const attend_item *item, int32_t split)
{
    const pl_batch *batch = model->batch;
    const int32_t last = item->first_token + item->num_tokens - 1 - batch->query_start[item->row];
    const int64_t beyond = last_key(batch, item->row, last) - (int64_t)split * PL_SPLIT_KEYS + 1;
    return beyond < item->num_tokens ? (int32_t)beyond : item->num_tokens;
}

int32_t count_attend(const stage *self)
{
    return self->model->plan.num_items * self->model->shape.num_kv_heads;
}

/* All splits of an item, merged as they come. */
static void attend_whole(const stage *self, const attend_item *item, int32_t kv_head)
{
    const pl_model *model = self->model;
    const int32_t group = model->shape.num_heads / model->shape.num_kv_heads, head_dim = model->shape.head_dim;
    float maximum[PL_ATTEND_QUERIES], total[PL_ATTEND_QUERIES];
    float sum[PL_ATTEND_QUERIES * PL_MAX_HEAD_DIM] __attribute__((aligned(64))), out[PL_ATTEND_QUERIES * PL_MAX_HEAD_DIM]
        __attribute__((aligned(64)));
    pl_partial merged[PL_ATTEND_QUERIES];
    pl_attend args = {.maximum = maximum, .total = total};
    for (int32_t split = item->first_split; split < item->end_split; split++) {
        const int32_t is_first = split == item->first_split;
        args.num_queries = num_seeing(model, item, split) * group;
        args.out = is_first ? sum : out;
        attend_split(model, self, item, kv_head, split, &args);
        const int32_t skipped = item->num_tokens * group - args.num_queries;
        for (int32_t i = 0; i < args.num_queries; i++) {
            const pl_partial part = {maximum[i], total[i], args.out + i * head_dim};
            if (is_first)
                merged[i] = part;
            else
                model->kernels->merge(&merged[skipped + i], &part, head_dim);
        }
    }
    for (int32_t t = 0; t < item->num_tokens; t++)
        finish(model, item->first_token + t, kv_head * group, group, merged + t * group);
}

void attend(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    pl_model *model = self->model;
    const int32_t num_kv_heads = model->shape.num_kv_heads, group = model->shape.num_heads / num_kv_heads;
    const int32_t kv_head = task % num_kv_heads, head_dim = model->shape.head_dim;
    const attend_item *item = &model->plan.items[task / num_kv_heads];
    if (model->plan.first_partial[item->first_token] < 0) {
        attend_whole(self, item, kv_head);
        return;
    }
    float maximum[PL_ATTEND_QUERIES], total[PL_ATTEND_QUERIES];
    float out[PL_ATTEND_QUERIES * PL_MAX_HEAD_DIM] __attribute__((aligned(64)));
    pl_attend args = {.maximum = maximum, .total = total, .out = out};
    args.num_queries = num_seeing(model, item, item->first_split) * group;
    attend_split(model, self, item, kv_head, item->first_split, &args);
    const int32_t first = item->first_token + item->num_tokens - args.num_queries / group;
    for (int32_t i = 0; i < args.num_queries; i++) {
        const int64_t base = model->plan.first_partial[first + i / group];
        pl_partial *partial = &model->plan.partials[base + item->first_split * model->shape.num_heads + kv_head * group + i % group];
        partial->maximum = maximum[i];
        partial->total = total[i];
        memcpy(partial->out, out + i * head_dim, (size_t)head_dim * sizeof(float));
    }
}

int32_t count_merge(const stage *self)
{
    return self->model->plan.num_split_tokens * self->model->shape.num_kv_heads;
}

void merge_splits(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    const pl_model *model = self->model;
    const int32_t num_heads = model->shape.num_heads, num_kv_heads = model->shape.num_kv_heads, group = num_heads / num_kv_heads;
    const split_token *one = &model->plan.split_tokens[task / num_kv_heads];
    const int32_t first_head = task % num_kv_heads * group;
    pl_partial *partials = model->plan.partials + model->plan.first_partial[one->token] + first_head;
    for (int32_t split = 1; split < one->num_splits; split++)
        for (int32_t h = 0; h < group; h++)
            model->kernels->merge(&partials[h], &partials[split * num_heads + h], model->shape.head_dim);
    finish(model, one->token, first_head, group, partials);
}
