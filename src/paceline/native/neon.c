/* Products and quantisation for aarch64 with the dot products of ARMv8.2: a register is four rows, a lane is a row. */
#include <arm_neon.h>
#include <float.h>
#include <string.h>

#include "tiles.h"
#include "lanes.h"

#define PL_INLINE static inline __attribute__((always_inline))

static void quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    for (int32_t group = 0; group < n / PL_GROUP; group++, x += PL_GROUP, q += PL_GROUP) {
        float32x4_t in[8];
        uint32x4_t largest = vdupq_n_u32(0); /* magnitudes compare as integers, and a NaN is above them all */
        for (int i = 0; i < 8; i++) {
            in[i] = vld1q_f32(x + 4 * i);
            largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(in[i]), vdupq_n_u32(0x7fffffff)));
        }
        const uint32_t bits = vmaxvq_u32(largest);
        float step;
        memcpy(&step, &bits, sizeof step);
        step /= 127.0f;
        if (step < FLT_MIN)
            step = 0.0f;
        scale[group] = step;
        if (!(step > 0.0f && step <= FLT_MAX)) {
            memset(q, 0, PL_GROUP);
            sum[group] = 0;
            continue;
        }
        const float32x4_t divisor = vdupq_n_f32(step);
        int32x4_t total = vdupq_n_s32(0);
        for (int i = 0; i < 8; i += 2) {
            const int32x4_t a = vcvtnq_s32_f32(vdivq_f32(in[i], divisor)), b = vcvtnq_s32_f32(vdivq_f32(in[i + 1], divisor));
            total = vaddq_s32(total, vaddq_s32(a, b));
            vst1_s8(q + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b))));
        }
        sum[group] = vaddvq_s32(total);
    }
}

PL_INLINE float32x4_t load_halves(const uint8_t *from)
{
    uint16_t halves[4];
    memcpy(halves, from, sizeof halves);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

/* Four lines of a group: element i of the lines against inputs 4 i .. 4 i + 3, which are lane i of `a`. */
PL_INLINE int32x4_t dot_four(int32x4_t dot, const int8x16_t line[4], int8x16_t a)
{
    dot = vdotq_laneq_s32(dot, line[0], a, 0);
    dot = vdotq_laneq_s32(dot, line[1], a, 1);
    dot = vdotq_laneq_s32(dot, line[2], a, 2);
    return vdotq_laneq_s32(dot, line[3], a, 3);
}

/* One tile against n tokens from `first`; n is a constant where this is inlined. */
PL_INLINE void w4_tokens(
    const uint8_t *group, int32_t num_groups, const pl_acts *acts, int32_t first, const int n, float *out, int64_t stride)
{
    const int64_t group_stride = acts->k / PL_GROUP;
    const int8_t *q = acts->q + (int64_t)first * acts->stride;
    const float *scales = acts->scale + first * group_stride;
    const float *offsets = acts->offset + first * group_stride;
    float32x4_t total[4][4];
    for (int t = 0; t < n; t++)
        for (int part = 0; part < 4; part++)
            total[t][part] = vdupq_n_f32(0.0f);
    for (int32_t g = 0; g < num_groups; g++, group += PL_W4_BYTES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            int8x16_t lower[4], upper[4];
            for (int line = 0; line < 4; line++) {
                const uint8x16_t both = vld1q_u8(group + 64 * line + 16 * part);
                lower[line] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                upper[line] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
            }
            const float32x4_t scale = load_halves(group + PL_W4_SCALES + 8 * part), minimum = load_halves(group + PL_W4_MINIMA + 8 * part);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const int8_t *four = q + t * (int64_t)acts->stride + g * PL_GROUP;
                int32x4_t dot = dot_four(vdupq_n_s32(0), lower, vld1q_s8(four));
                dot = dot_four(dot, upper, vld1q_s8(four + 16));
                const float step = scales[t * group_stride + g];
                const float32x4_t offset = vdupq_n_f32(offsets[t * group_stride + g]);
                total[t][part] = vaddq_f32(total[t][part], vmulq_f32(vcvtq_f32_s32(dot), vmulq_f32(scale, vdupq_n_f32(step))));
                total[t][part] = vaddq_f32(total[t][part], vmulq_f32(minimum, offset));
            }
        }
    for (int t = 0; t < n; t++)
        for (int part = 0; part < 4; part++)
            vst1q_f32(out + t * stride + 4 * part, total[t][part]);
}

PL_INLINE void w8_tokens(
    const uint8_t *group, int32_t num_groups, const pl_acts *acts, int32_t first, const int n, float *out, int64_t stride)
{
    const int64_t group_stride = acts->k / PL_GROUP;
    const int8_t *q = acts->q + (int64_t)first * acts->stride;
    const float *scales = acts->scale + first * group_stride;
    float32x4_t total[4][4];
    for (int t = 0; t < n; t++)
        for (int part = 0; part < 4; part++)
            total[t][part] = vdupq_n_f32(0.0f);
    for (int32_t g = 0; g < num_groups; g++, group += PL_W8_BYTES)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            int8x16_t lines[8];
            for (int line = 0; line < 8; line++)
                lines[line] = vreinterpretq_s8_u8(vld1q_u8(group + 64 * line + 16 * part));
            const float32x4_t scale = load_halves(group + PL_W8_SCALES + 8 * part);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const int8_t *four = q + t * (int64_t)acts->stride + g * PL_GROUP;
                int32x4_t dot = dot_four(vdupq_n_s32(0), lines, vld1q_s8(four));
                dot = dot_four(dot, lines + 4, vld1q_s8(four + 16));
                const float32x4_t step = vdupq_n_f32(scales[t * group_stride + g]);
                total[t][part] = vaddq_f32(total[t][part], vmulq_f32(vcvtq_f32_s32(dot), vmulq_f32(scale, step)));
            }
        }
    for (int t = 0; t < n; t++)
        for (int part = 0; part < 4; part++)
            vst1q_f32(out + t * stride + 4 * part, total[t][part]);
}
static void tile_w4(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
PL_IN_TOKEN_BLOCKS(w4_tokens)

static void tile_w8(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
PL_IN_TOKEN_BLOCKS(w8_tokens)

const pl_kernels pl_neon = {
    .name = "neon",
    .quantise = quantise,
    .tile_w4 = tile_w4,
    .tile_w8 = tile_w8,
    PL_LANES,
};
