/* One product with a packed matrix: inputs quantised, then tiles. For tests, `doctor` and benchmarks; a pass has its own program. */
#include <stdlib.h>

#include "tiles.h"

enum { TASK_BYTES = 16384 }; /* weights of a task: a few microseconds */

typedef struct {
    const pl_kernels *kernels;
    const pl_matrix *matrix;
    const float *x;
    float *out;
    pl_acts acts;
    int32_t num_rows, tiles_per_task;
} product;

void pl_quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    pl_current()->quantise(x, n, q, scale, sum);
}

static void quantise_row(void *context, int32_t row, int32_t thread)
{
    (void)thread;
    const product *self = context;
    const int32_t k = self->acts.k;
    pl_quantise_groups(self->kernels, self->x + (int64_t)row * k, k, &self->acts, row, 0);
}

static void multiply(void *context, int32_t task, int32_t thread)
{
    (void)thread;
    const product *self = context;
    const int32_t num_tiles = pl_num_tiles(self->matrix), first = task * self->tiles_per_task;
    for (int32_t tile = first; tile < first + self->tiles_per_task && tile < num_tiles; tile++)
        pl_tile_product(self->kernels, self->matrix, tile, &self->acts, 0, self->num_rows, self->out, self->matrix->rows);
}

int32_t pl_linear(pl_pool *pool, const pl_matrix *matrix, const float *x, int32_t num_rows, float *out)
{
    const int32_t stride = pl_acts_stride(matrix->k);
    const size_t num_scales = (size_t)num_rows * (size_t)(matrix->k / PL_GROUP);
    product self = {.kernels = pl_current(), .matrix = matrix, .x = x, .out = out, .num_rows = num_rows};
    self.acts = (pl_acts){.k = matrix->k, .stride = stride};
    self.acts.q = aligned_alloc(64, (size_t)num_rows * (size_t)stride);
    self.acts.scale = malloc(num_scales * sizeof(float));
    self.acts.sum = malloc(num_scales * sizeof(int32_t));
    self.acts.offset = malloc(num_scales * sizeof(float));
    int32_t failed = self.acts.q && self.acts.scale && self.acts.sum && self.acts.offset ? 0 : -1;
    if (!failed) {
        const int32_t tiles = (int32_t)(TASK_BYTES / pl_tile_bytes(matrix));
        self.tiles_per_task = tiles > 1 ? tiles : 1;
        const int32_t num_tasks = (pl_num_tiles(matrix) + self.tiles_per_task - 1) / self.tiles_per_task;
        const pl_phase phases[] = {
            {.run = quantise_row, .context = &self, .num_tasks = num_rows},
            {.run = multiply, .context = &self, .num_tasks = num_tasks},
        };
        failed = pl_pool_run(pool, phases, 2);
    }
    free(self.acts.q);
    free(self.acts.scale);
    free(self.acts.sum);
    free(self.acts.offset);
    return failed;
}
