/* The stages of every op but attention: what one task computes, and how many tasks there are.
 *
 * A task of a product takes a few tiles and up to BLOCK_TOKENS tokens: the tiles then stay in the first cache while the tokens pass.
 * Tasks that share tiles follow each other, so that long prompts read the weights from memory once per phase or little more.
 */
#include <math.h>

#include "program.h"

#define BLOCK_TOKENS 64    /* of a product */
#define ROW_TOKENS 8       /* of what runs token by token */
#define TASK_BYTES 12288   /* weights of a task: a few microseconds, so that threads end together, and far more than a ticket costs */

static int32_t divide_up(int64_t a, int32_t b)
{
    return (int32_t)((a + b - 1) / b);
}

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t token_blocks(const stage *self)
{
    return divide_up(self->model->batch->num_tokens, BLOCK_TOKENS);
}

static int32_t tiles_of_task(const pl_matrix *matrix)
{
    const int32_t tiles = (int32_t)(TASK_BYTES / pl_tile_bytes(matrix));
    return tiles > 1 ? tiles : 1;
}

/* One tile against `count` tokens, bias added: out [count, 16], rows `stride` apart. All 16 rows are the matrix's own. */
static void whole_tile(
    const pl_model *model, const pl_matrix *matrix, int32_t tile, const pl_acts *acts, int32_t first, int32_t count, float *out,
    int32_t stride)
{
    const uint8_t *data = matrix->data + tile * pl_tile_bytes(matrix);
    const pl_kernels *kernels = model->kernels;
    (matrix->format == PL_W4 ? kernels->tile_w4 : kernels->tile_w8)(data, matrix->k / PL_GROUP, acts, first, count, out, stride);
    if (matrix->bias)
        for (int32_t t = 0; t < count; t++)
            for (int32_t r = 0; r < PL_TILE_ROWS; r++)
                out[(int64_t)t * stride + r] += matrix->bias[tile * PL_TILE_ROWS + r];
}

/* Embedding rows, and the rotary angles of the tokens' positions. */
static int32_t count_token_rows(const stage *self)
{
    return divide_up(self->model->batch->num_tokens, ROW_TOKENS);
}

static void embed(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    pl_model *model = self->model;
    const int32_t half = model->shape.head_dim / 2, end = smaller(model->batch->num_tokens, (task + 1) * ROW_TOKENS);
    for (int32_t t = task * ROW_TOKENS; t < end; t++) {
        pl_unpack_row(&self->op->first, (int32_t)model->batch->token_ids[t], model->stream + (int64_t)t * model->shape.hidden);
        const float position = (float)model->batch->positions[t];
        for (int32_t i = 0; i < half; i++)
            turn_by(position * model->frequencies[i], model->cosines + (int64_t)t * half + i, model->sines + (int64_t)t * half + i);
    }
}

/* RMSNorm and quantisation of every token. */
static void norm_row(const stage *self, int64_t token, int32_t row)
{
    const pl_model *model = self->model;
    float *scratch = model->norm_rows + (int64_t)row * model->shape.hidden;
    model->kernels->rms_norm(model->stream + token * model->shape.hidden, self->op->norm, model->shape.eps, model->shape.hidden, scratch);
    pl_quantise_groups(model->kernels, scratch, model->shape.hidden, &model->normed, row, 0);
}

static void norm(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    const int32_t end = smaller(self->model->batch->num_tokens, (task + 1) * ROW_TOKENS);
    for (int32_t t = task * ROW_TOKENS; t < end; t++)
        norm_row(self, t, t);
}

/* One head of q, k or v: product, bias, norm, rotation; keys and values go to their pages. */
static int32_t count_heads(const stage *self)
{
    const pl_shape *shape = &self->model->shape;
    return (shape->num_heads + 2 * shape->num_kv_heads) * token_blocks(self);
}

static void write_half(const pl_model *model, int32_t layer, int32_t plane, int32_t head, int32_t token, const float *x)
{
    const int32_t head_dim = model->shape.head_dim;
    const int64_t matrix = ((int64_t)layer * 2 + plane) * model->shape.num_kv_heads + head;
    const int64_t slot = matrix * model->kv.num_slots + model->batch->write_slots[token];
    model->kernels->to_half(x, head_dim, model->kv.data + slot * head_dim);
}

static void qkv_head(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    pl_model *model = self->model;
    const pl_shape *shape = &model->shape;
    const int32_t num_blocks = token_blocks(self), head = task / num_blocks, first = task % num_blocks * BLOCK_TOKENS;
    const int32_t count = smaller(model->batch->num_tokens - first, BLOCK_TOKENS), head_dim = shape->head_dim;
    const int32_t width = (shape->num_heads + 2 * shape->num_kv_heads) * head_dim, tiles = head_dim / PL_TILE_ROWS;
    const int32_t is_q = head < shape->num_heads, is_v = head >= shape->num_heads + shape->num_kv_heads;
    float *out = model->qkv + (int64_t)first * width + head * head_dim;
    for (int32_t i = 0; i < tiles; i++)
        whole_tile(model, &self->op->first, head * tiles + i, &model->normed, first, count, out + i * PL_TILE_ROWS, width);
    const float *gain = is_q ? self->op->q_norm : self->op->k_norm;
    const float scale = 1.0f / sqrtf((float)head_dim);
    for (int32_t t = first; t < first + count; t++, out += width) {
        if (!is_v) {
            if (gain)
                model->kernels->rms_norm(out, gain, shape->eps, head_dim, out);
            const int64_t turn = (int64_t)t * (head_dim / 2);
            model->kernels->rope(out, model->cosines + turn, model->sines + turn, head_dim);
        }
        if (is_q)
            for (int32_t i = 0; i < head_dim; i++)
                out[i] *= scale;
        else
            write_half(model, self->op->layer, is_v, head - shape->num_heads - (is_v ? shape->num_kv_heads : 0), t, out);
    }
}

/* A product added to the residual stream: attention's output, or the MLP's. */
static int32_t count_residual(const stage *self)
{
    return divide_up(pl_num_tiles(&self->op->first), tiles_of_task(&self->op->first)) * token_blocks(self);
}

static void add_residual(const stage *self, int32_t task, const pl_acts *acts)
{
    pl_model *model = self->model;
    const pl_matrix *matrix = &self->op->first;
    const int32_t num_blocks = token_blocks(self), first = task % num_blocks * BLOCK_TOKENS, tiles = tiles_of_task(matrix);
    const int32_t count = smaller(model->batch->num_tokens - first, BLOCK_TOKENS);
    const int32_t first_tile = task / num_blocks * tiles, end_tile = smaller(pl_num_tiles(matrix), first_tile + tiles);
    float block[BLOCK_TOKENS * PL_TILE_ROWS];
    for (int32_t tile = first_tile; tile < end_tile; tile++) {
        whole_tile(model, matrix, tile, acts, first, count, block, PL_TILE_ROWS);
        for (int32_t t = 0; t < count; t++) {
            float *stream = model->stream + (int64_t)(first + t) * model->shape.hidden + tile * PL_TILE_ROWS;
            for (int32_t r = 0; r < PL_TILE_ROWS; r++)
                stream[r] += block[t * PL_TILE_ROWS + r];
        }
    }
}

static void out_residual(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    add_residual(self, task, &self->model->mixed);
}

static void down_residual(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    add_residual(self, task, &self->model->gated);
}

/* 32 outputs of gate and of up, which are one group of the next product's inputs. */
static int32_t count_gate_up(const stage *self)
{
    return self->model->shape.intermediate / PL_GROUP * token_blocks(self);
}

static void gate_up(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    pl_model *model = self->model;
    const int32_t num_blocks = token_blocks(self), group = task / num_blocks, first = task % num_blocks * BLOCK_TOKENS;
    const int32_t count = smaller(model->batch->num_tokens - first, BLOCK_TOKENS);
    float gate[BLOCK_TOKENS * PL_GROUP], up[BLOCK_TOKENS * PL_GROUP];
    for (int32_t i = 0; i < PL_GROUP / PL_TILE_ROWS; i++) {
        const int32_t tile = group * (PL_GROUP / PL_TILE_ROWS) + i;
        whole_tile(model, &self->op->first, tile, &model->normed, first, count, gate + i * PL_TILE_ROWS, PL_GROUP);
        whole_tile(model, &self->op->second, tile, &model->normed, first, count, up + i * PL_TILE_ROWS, PL_GROUP);
    }
    model->kernels->silu_mul(gate, up, count * PL_GROUP, gate);
    for (int32_t t = 0; t < count; t++)
        pl_quantise_groups(model->kernels, gate + t * PL_GROUP, PL_GROUP, &model->gated, first + t, group);
}

/* Logits of the rows that want them. */
static int32_t count_logit_rows(const stage *self)
{
    return divide_up(self->model->batch->num_logits, ROW_TOKENS);
}

static void norm_logit_rows(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    const int32_t end = smaller(self->model->batch->num_logits, (task + 1) * ROW_TOKENS);
    for (int32_t row = task * ROW_TOKENS; row < end; row++)
        norm_row(self, self->model->batch->logit_rows[row], row);
}

static int32_t count_head(const stage *self)
{
    return divide_up(pl_num_tiles(&self->op->first), tiles_of_task(&self->op->first)) *
           divide_up(self->model->batch->num_logits, BLOCK_TOKENS);
}

static void head(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const stage *self = context;
    const pl_model *model = self->model;
    const pl_matrix *matrix = &self->op->first;
    const int32_t num_blocks = divide_up(model->batch->num_logits, BLOCK_TOKENS), first = task % num_blocks * BLOCK_TOKENS;
    const int32_t count = smaller(model->batch->num_logits - first, BLOCK_TOKENS), tiles = tiles_of_task(matrix);
    const int32_t first_tile = task / num_blocks * tiles, end_tile = smaller(pl_num_tiles(matrix), first_tile + tiles);
    float *out = model->logits + (int64_t)first * matrix->rows;
    for (int32_t tile = first_tile; tile < end_tile; tile++)
        pl_tile_product(model->kernels, matrix, tile, &model->normed, first, count, out, matrix->rows);
}

int32_t stages_of(pl_model *model, const pl_op *op, stage *stages)
{
    static const stage by_kind[PL_NUM_KINDS][MAX_OP_STAGES] = {
        [PL_EMBED] = {{.count = count_token_rows, .run = embed}},
        [PL_NORM_QKV_ROPE_WRITE] = {{.count = count_token_rows, .run = norm}, {.count = count_heads, .run = qkv_head}},
        [PL_PAGED_ATTENTION] = {{.count = count_attend, .run = attend}, {.count = count_merge, .run = merge_splits}},
        [PL_OUT_RESIDUAL] = {{.count = count_residual, .run = out_residual}},
        [PL_NORM_GATE_UP] = {{.count = count_token_rows, .run = norm}, {.count = count_gate_up, .run = gate_up}},
        [PL_DOWN_RESIDUAL] = {{.count = count_residual, .run = down_residual}},
        [PL_NORM_HEAD] = {{.count = count_logit_rows, .run = norm_logit_rows}, {.count = count_head, .run = head}},
    };
    int32_t num_stages = 0;
    for (; num_stages < MAX_OP_STAGES && by_kind[op->kind][num_stages].run; num_stages++) {
        stages[num_stages] = by_kind[op->kind][num_stages];
        stages[num_stages].model = model;
        stages[num_stages].op = op;
    }
    return num_stages;
}
