/* Where things lie in a packed matrix (paceline_native.h, enum pl_format), and the products of whole tiles with bias and ragged edge. */
#ifndef PL_TILES_H
#define PL_TILES_H

#include <string.h>

#include "kernels.h"

enum {
    PL_W4_SCALES = 256,                    /* where a group's fp16 scales begin */
    PL_W4_MINIMA = PL_W4_SCALES + 32,
    PL_W4_BYTES = PL_W4_MINIMA + 32,       /* bytes of a group */
    PL_W8_SCALES = 512,
    PL_W8_BYTES = PL_W8_SCALES + 32
};

static inline int32_t pl_num_tiles(const pl_matrix *matrix)
{
    return (matrix->rows + PL_TILE_ROWS - 1) / PL_TILE_ROWS;
}

static inline int64_t pl_tile_bytes(const pl_matrix *matrix)
{
    return (int64_t)(matrix->k / PL_GROUP) * (matrix->format == PL_W4 ? PL_W4_BYTES : PL_W8_BYTES);
}

/* Bytes from one token's quantised inputs to the next one's. */
static inline int32_t pl_acts_stride(int32_t k)
{
    return (k + 63) / 64 * 64;
}

/* x [n] as groups from `first_group` on of row `row`. */
static inline void pl_quantise_groups(
    const pl_kernels *kernels, const float *x, int32_t n, const pl_acts *acts, int64_t row, int32_t first_group)
{
    const int64_t at = row * (acts->k / PL_GROUP) + first_group;
    kernels->quantise(x, n, acts->q + row * acts->stride + (int64_t)first_group * PL_GROUP, acts->scale + at, acts->sum + at);
    for (int32_t g = 0; g < n / PL_GROUP; g++)
        acts->offset[at + g] = acts->scale[at + g] * (float)acts->sum[at + g];
}

/* The body of a tile_w4 or tile_w8: `tokens` takes as many tokens as its argument n says, a constant where it is inlined. */
#define PL_IN_TOKEN_BLOCKS(tokens)                                                              \
    {                                                                                           \
        int32_t done = 0;                                                                       \
        for (; done + 4 <= count; done += 4)                                                    \
            tokens(tile, num_groups, acts, first + done, 4, out + (int64_t)done * stride, stride); \
        if (done + 2 <= count) {                                                                \
            tokens(tile, num_groups, acts, first + done, 2, out + (int64_t)done * stride, stride); \
            done += 2;                                                                          \
        }                                                                                       \
        if (done < count)                                                                       \
            tokens(tile, num_groups, acts, first + done, 1, out + (int64_t)done * stride, stride); \
    }

/* One tile of `matrix` against tokens first .. first + count - 1, bias added: out[t * stride + row], t from 0, row of the matrix. */
static inline void pl_tile_product(
    const pl_kernels *kernels, const pl_matrix *matrix, int32_t tile, const pl_acts *acts, int32_t first, int32_t count, float *out,
    int32_t stride)
{
    enum { BLOCK = 16 }; /* tokens of the ragged edge at a time */
    const uint8_t *data = matrix->data + tile * pl_tile_bytes(matrix);
    const int32_t num_groups = matrix->k / PL_GROUP, row = tile * PL_TILE_ROWS;
    void (*product)(const uint8_t *, int32_t, const pl_acts *, int32_t, int32_t, float *, int32_t);
    product = matrix->format == PL_W4 ? kernels->tile_w4 : kernels->tile_w8;
    int32_t num_rows = matrix->rows - row;
    if (num_rows >= PL_TILE_ROWS) {
        num_rows = PL_TILE_ROWS;
        product(data, num_groups, acts, first, count, out + row, stride);
    } else {
        float block[BLOCK * PL_TILE_ROWS];
        for (int32_t done = 0; done < count; done += BLOCK) {
            const int32_t part = count - done < BLOCK ? count - done : BLOCK;
            product(data, num_groups, acts, first + done, part, block, PL_TILE_ROWS);
            for (int32_t t = 0; t < part; t++)
                memcpy(out + (int64_t)(done + t) * stride + row, block + t * PL_TILE_ROWS, (size_t)num_rows * sizeof(float));
        }
    }
    if (matrix->bias)
        for (int32_t t = 0; t < count; t++)
            for (int32_t r = 0; r < num_rows; r++)
                out[(int64_t)t * stride + row + r] += matrix->bias[row + r];
}

#endif
