/* Every kernel in plain C: what runs on a processor that has no table of its own, and what the others are tested against. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "half.h"
#include "tiles.h"
#include "lanes.h"

/* The group's scale, and whether its elements are to be quantised: not if the scale is a NaN or infinite, or too small to divide by. */
static int usable_scale(float largest, float *scale)
{
    *scale = largest / 127.0f;
    if (*scale < FLT_MIN)
        *scale = 0.0f;
    return *scale > 0.0f && *scale <= FLT_MAX;
}

static void quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    for (int32_t group = 0; group < n / PL_GROUP; group++, x += PL_GROUP, q += PL_GROUP) {
        uint32_t largest = 0; /* magnitudes compare as integers, and a NaN is above them all */
        for (int32_t i = 0; i < PL_GROUP; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        float magnitude;
        memcpy(&magnitude, &largest, sizeof magnitude);
        int32_t total = 0;
        if (usable_scale(magnitude, scale + group)) {
            for (int32_t i = 0; i < PL_GROUP; i++) {
                const float rounded = x[i] / scale[group] + 0x1.8p23f; /* the sum's low bits are the nearest integer, ties to even */
                uint32_t bits;
                memcpy(&bits, &rounded, sizeof bits);
                const int32_t element = (int32_t)(bits - 0x4b400000);
                q[i] = (int8_t)element;
                total += element;
            }
        } else
            memset(q, 0, PL_GROUP);
        sum[group] = total;
    }
}

static void tile_w4(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    for (int32_t t = 0; t < count; t++, out += stride) {
        const int8_t *q = acts->q + (int64_t)(first + t) * acts->stride;
        const float *scale = acts->scale + (int64_t)(first + t) * (acts->k / PL_GROUP);
        const float *offset = acts->offset + (int64_t)(first + t) * (acts->k / PL_GROUP);
        const uint8_t *group = tile;
        float total[PL_TILE_ROWS] = {0};
        for (int32_t g = 0; g < num_groups; g++, group += PL_W4_BYTES, q += PL_GROUP) {
            int32_t dot[PL_TILE_ROWS] = {0};
            for (int32_t line = 0; line < 4; line++)
                for (int32_t r = 0; r < PL_TILE_ROWS; r++)
                    for (int32_t i = 4 * line; i < 4 * line + 4; i++) {
                        const int32_t both = group[64 * line + 4 * r + i % 4];
                        dot[r] += (both & 15) * q[i] + (both >> 4) * q[i + 16];
                    }
            for (int32_t r = 0; r < PL_TILE_ROWS; r++) {
                total[r] += (float)dot[r] * (pl_half_to_float(pl_load_half(group + PL_W4_SCALES + 2 * r)) * scale[g]);
                total[r] += pl_half_to_float(pl_load_half(group + PL_W4_MINIMA + 2 * r)) * offset[g];
            }
        }
        memcpy(out, total, sizeof total);
    }
}

static void tile_w8(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    for (int32_t t = 0; t < count; t++, out += stride) {
        const int8_t *q = acts->q + (int64_t)(first + t) * acts->stride;
        const float *scale = acts->scale + (int64_t)(first + t) * (acts->k / PL_GROUP);
        const uint8_t *group = tile;
        float total[PL_TILE_ROWS] = {0};
        for (int32_t g = 0; g < num_groups; g++, group += PL_W8_BYTES, q += PL_GROUP) {
            int32_t dot[PL_TILE_ROWS] = {0};
            for (int32_t line = 0; line < 8; line++)
                for (int32_t r = 0; r < PL_TILE_ROWS; r++)
                    for (int32_t i = 0; i < 4; i++)
                        dot[r] += (int8_t)group[64 * line + 4 * r + i] * q[4 * line + i];
            for (int32_t r = 0; r < PL_TILE_ROWS; r++)
                total[r] += (float)dot[r] * (pl_half_to_float(pl_load_half(group + PL_W8_SCALES + 2 * r)) * scale[g]);
        }
        memcpy(out, total, sizeof total);
    }
}

const pl_kernels pl_portable = {
    .name = "portable",
    .quantise = quantise,
    .tile_w4 = tile_w4,
    .tile_w8 = tile_w8,
    PL_LANES,
};
