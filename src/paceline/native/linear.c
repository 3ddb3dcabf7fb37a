/* One product with a packed matrix: inputs quantised, tiles computed. For tests, `doctor` and benchmarks; a pass has its own program. */
#include <stdlib.h>

#include "tiles.h"

void pl_quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    pl_current()->quantise(x, n, q, scale, sum);
}

int32_t pl_linear(pl_pool *pool, const pl_matrix *matrix, const float *x, int32_t num_rows, float *out)
{
    (void)pool;
    const pl_kernels *kernels = pl_current();
    const int32_t num_groups = matrix->k / PL_GROUP, stride = pl_acts_stride(matrix->k);
    const size_t num_scales = (size_t)num_rows * (size_t)num_groups;
    pl_acts acts = {.k = matrix->k, .stride = stride};
    acts.q = aligned_alloc(64, (size_t)num_rows * (size_t)stride);
    acts.scale = malloc(num_scales * sizeof(float));
    acts.sum = malloc(num_scales * sizeof(int32_t));
    const int32_t failed = acts.q == NULL || acts.scale == NULL || acts.sum == NULL ? -1 : 0;
    if (!failed) {
        for (int32_t row = 0; row < num_rows; row++) {
            const int64_t at = (int64_t)row * num_groups;
            kernels->quantise(x + (int64_t)row * matrix->k, matrix->k, acts.q + (int64_t)row * stride, acts.scale + at, acts.sum + at);
        }
        for (int32_t tile = 0; tile < pl_num_tiles(matrix); tile++)
            pl_tile_product(kernels, matrix, tile, &acts, 0, num_rows, out, matrix->rows);
    }
    free(acts.q);
    free(acts.scale);
    free(acts.sum);
    return failed;
}
