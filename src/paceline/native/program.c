/* Makes a model's program and runs passes. */
#include <stdlib.h>
#include <time.h>

#include "program.h"

static void *room(size_t count, size_t size)
{
    const size_t bytes = (count * size + 63) / 64 * 64;
    return aligned_alloc(64, bytes ? bytes : 64);
}

static float *floats(int64_t rows, int64_t columns)
{
    return room((size_t)(rows * columns), sizeof(float));
}

static int32_t make_acts(pl_acts *acts, int32_t num_rows, int32_t k)
{
    acts->k = k;
    acts->stride = pl_acts_stride(k);
    acts->q = room((size_t)num_rows * (size_t)acts->stride, 1);
    acts->scale = floats(num_rows, k / PL_GROUP);
    acts->sum = room((size_t)num_rows * (size_t)(k / PL_GROUP), sizeof(int32_t));
    acts->offset = floats(num_rows, k / PL_GROUP);
    return acts->q && acts->scale && acts->sum && acts->offset ? 0 : -1;
}

static void free_acts(pl_acts *acts)
{
    free(acts->q);
    free(acts->scale);
    free(acts->sum);
    free(acts->offset);
}

static int32_t make_scratch(pl_model *model)
{
    const pl_shape *shape = &model->shape;
    const int32_t tokens = model->max_tokens, rows = tokens > model->max_logits ? tokens : model->max_logits;
    const int32_t heads_width = shape->num_heads * shape->head_dim, half = shape->head_dim / 2;
    model->frequencies = floats(1, half);
    model->cosines = floats(tokens, half);
    model->sines = floats(tokens, half);
    model->own_stream = floats(tokens, shape->hidden);
    model->norm_rows = floats(rows, shape->hidden);
    model->qkv = floats(tokens, heads_width + 2 * shape->num_kv_heads * shape->head_dim);
    model->attended = floats(tokens, heads_width);
    model->plan.split_tokens = room((size_t)tokens, sizeof(split_token));
    model->plan.first_partial = room((size_t)tokens, sizeof(int64_t));
    const int32_t failed = make_acts(&model->normed, rows, shape->hidden) | make_acts(&model->mixed, tokens, heads_width) |
                           make_acts(&model->gated, tokens, shape->intermediate);
    if (failed || !model->frequencies || !model->cosines || !model->sines || !model->own_stream || !model->norm_rows || !model->qkv ||
        !model->attended || !model->plan.split_tokens || !model->plan.first_partial)
        return -1;
    memcpy(model->frequencies, shape->frequencies, (size_t)half * sizeof(float));
    return 0;
}

static int32_t make_stages(pl_model *model, const pl_op *ops)
{
    const size_t most = (size_t)model->num_ops * MAX_OP_STAGES;
    model->ops = room((size_t)model->num_ops, sizeof *ops);
    model->stages = room(most, sizeof *model->stages);
    model->phases = room(most, sizeof *model->phases);
    model->ended_ns = room(most, sizeof *model->ended_ns);
    if (!model->ops || !model->stages || !model->phases || !model->ended_ns)
        return -1;
    memcpy(model->ops, ops, (size_t)model->num_ops * sizeof *ops);
    for (int32_t i = 0; i < model->num_ops; i++)
        model->num_stages += stages_of(model, &model->ops[i], model->stages + model->num_stages);
    for (int32_t i = 0; i < model->num_stages; i++)
        model->phases[i] = (pl_phase){.run = model->stages[i].run, .context = &model->stages[i]};
    return 0;
}

pl_model *pl_model_new(const pl_shape *shape, const pl_op *ops, int32_t num_ops, int32_t max_tokens, int32_t max_logits)
{
    pl_model *model = calloc(1, sizeof *model);
    if (!model)
        return NULL;
    model->shape = *shape;
    model->num_ops = num_ops;
    model->max_tokens = max_tokens;
    model->max_logits = max_logits;
    if (make_scratch(model) != 0 || make_stages(model, ops) != 0) {
        pl_model_free(model);
        return NULL;
    }
    return model;
}

void pl_model_free(pl_model *model)
{
    if (!model)
        return;
    float *const memory[] = {model->frequencies, model->cosines, model->sines,   model->own_stream,
                             model->norm_rows,   model->qkv,     model->attended};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        free(memory[i]);
    free_acts(&model->normed);
    free_acts(&model->mixed);
    free_acts(&model->gated);
    free(model->plan.items);
    free(model->plan.split_tokens);
    free(model->plan.first_partial);
    free(model->plan.partials);
    free(model->plan.partial_values);
    free(model->ops);
    free(model->stages);
    free(model->phases);
    free(model->ended_ns);
    free(model);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int32_t pl_run(pl_pool *pool, pl_model *model, const pl_batch *batch, const pl_kv *kv, float *logits, float *hidden, int64_t *profile_ns)
{
    int64_t before_ns = profile_ns ? now_ns() : 0;
    model->kernels = pl_current();
    model->batch = batch;
    model->kv = *kv;
    model->stream = hidden ? hidden : model->own_stream;
    model->logits = logits;
    if (plan_attention(model, pl_pool_threads(pool)) != 0)
        return -1;
    for (int32_t i = 0; i < model->num_stages; i++) {
        model->phases[i].num_tasks = model->stages[i].count(&model->stages[i]);
        model->phases[i].ended_ns = profile_ns ? &model->ended_ns[i] : NULL;
    }
    const int32_t failed = pl_pool_run(pool, model->phases, model->num_stages);
    if (failed)
        return failed;
    if (profile_ns)
        for (int32_t i = 0; i < model->num_stages; i++) {
            profile_ns[model->stages[i].op->kind] += model->ended_ns[i] - before_ns;
            before_ns = model->ended_ns[i];
        }
    return 0;
}
