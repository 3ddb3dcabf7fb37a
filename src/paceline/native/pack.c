/* Weights into the order in which the products read them, and one row back out of it. Called at load, and for embedding rows. */
#include <string.h>

#include "half.h"
#include "tiles.h"

int64_t pl_packed_bytes(int32_t format, int32_t rows, int32_t k)
{
    const pl_matrix matrix = {.rows = rows, .k = k, .format = format};
    return pl_num_tiles(&matrix) * pl_tile_bytes(&matrix);
}

static inline uint32_t load_four(const uint8_t *from)
{
    uint32_t four;
    memcpy(&four, from, sizeof four);
    return four;
}

/* One row's part of a group: `elements` [32], to the group's first byte. */
static void pack_row(int32_t format, int32_t row, const uint8_t *elements, uint16_t scale, uint16_t minimum, uint8_t *group)
{
    if (format == PL_W4) {
        for (int32_t line = 0; line < 4; line++) {
            const uint32_t both = load_four(elements + 4 * line) | load_four(elements + 16 + 4 * line) << 4;
            memcpy(group + 64 * line + 4 * row, &both, sizeof both);
        }
        memcpy(group + PL_W4_SCALES + 2 * row, &scale, sizeof scale);
        memcpy(group + PL_W4_MINIMA + 2 * row, &minimum, sizeof minimum);
    } else {
        for (int32_t line = 0; line < 8; line++)
            memcpy(group + 64 * line + 4 * row, elements + 4 * line, 4);
        memcpy(group + PL_W8_SCALES + 2 * row, &scale, sizeof scale);
    }
}

void pl_pack(
    int32_t format, int32_t rows, int32_t k, const uint8_t *elements, const uint16_t *scales, const uint16_t *minima, uint8_t *packed)
{
    const int32_t num_groups = k / PL_GROUP;
    const int64_t group_bytes = format == PL_W4 ? PL_W4_BYTES : PL_W8_BYTES;
    for (int32_t first = 0; first < rows; first += PL_TILE_ROWS) {
        uint8_t *tile = packed + first / PL_TILE_ROWS * (group_bytes * num_groups);
        if (rows - first < PL_TILE_ROWS)
            memset(tile, 0, (size_t)(group_bytes * num_groups));
        for (int32_t row = 0; row < PL_TILE_ROWS && first + row < rows; row++)
            for (int32_t group = 0; group < num_groups; group++) {
                const int64_t at = (int64_t)(first + row) * num_groups + group;
                pack_row(format, row, elements + at * PL_GROUP, scales[at], minima ? minima[at] : 0, tile + group * group_bytes);
            }
    }
}

void pl_unpack_row(const pl_matrix *matrix, int32_t row, float *out)
{
    const uint8_t *tile = matrix->data + row / PL_TILE_ROWS * pl_tile_bytes(matrix);
    const int32_t num_groups = matrix->k / PL_GROUP, r = row % PL_TILE_ROWS;
    for (int32_t group = 0; group < num_groups; group++, out += PL_GROUP) {
        if (matrix->format == PL_W4) {
            const float scale = pl_half_to_float(pl_load_half(tile + PL_W4_SCALES + 2 * r));
            const float minimum = pl_half_to_float(pl_load_half(tile + PL_W4_MINIMA + 2 * r));
            for (int32_t i = 0; i < PL_GROUP / 2; i++) {
                const uint8_t both = tile[64 * (i / 4) + 4 * r + i % 4];
                out[i] = scale * (float)(both & 15) + minimum;
                out[i + 16] = scale * (float)(both >> 4) + minimum;
            }
            tile += PL_W4_BYTES;
        } else {
            const float scale = pl_half_to_float(pl_load_half(tile + PL_W8_SCALES + 2 * r));
            for (int32_t i = 0; i < PL_GROUP; i++)
                out[i] = scale * (float)(int8_t)tile[64 * (i / 4) + 4 * r + i % 4];
            tile += PL_W8_BYTES;
        }
    }
}
