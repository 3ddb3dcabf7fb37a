/* Products and quantisation for AVX-512 with VNNI: a line of 64 bytes is one register, a lane is a row.
 *
 * vpdpbusd takes unsigned weights and signed activations and is exact in 32 bits. Eight-bit weights become unsigned by 128 more, and the
 * sum of the activations times 128 is taken off again.
 */
#include "lanes.h"
#include "x86.h"

PL_INLINE __m512 load_halves(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* One tile against n tokens from `first`; n is a constant where this is inlined. */
PL_INLINE void w4_tokens(
    const uint8_t *group, int32_t num_groups, const pl_acts *acts, int32_t first, const int n, float *out, int64_t stride)
{
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t group_stride = acts->k / PL_GROUP;
    const int8_t *q = acts->q + (int64_t)first * acts->stride;
    const float *scales = acts->scale + first * group_stride;
    const float *offsets = acts->offset + first * group_stride;
    __m512 total[4];
    for (int t = 0; t < n; t++)
        total[t] = _mm512_setzero_ps();
    for (int32_t g = 0; g < num_groups; g++, group += PL_W4_BYTES) {
        __m512i dot[4];
        for (int t = 0; t < n; t++)
            dot[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int line = 0; line < 4; line++) {
            const __m512i both = _mm512_load_si512(group + 64 * line);
            const __m512i lower = _mm512_and_si512(both, low), upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const int8_t *four = q + t * (int64_t)acts->stride + g * PL_GROUP + 4 * line;
                dot[t] = _mm512_dpbusd_epi32(dot[t], lower, _mm512_set1_epi32(pl_load_four(four)));
                dot[t] = _mm512_dpbusd_epi32(dot[t], upper, _mm512_set1_epi32(pl_load_four(four + 16)));
            }
        }
        const __m512 scale = load_halves(group + PL_W4_SCALES), minimum = load_halves(group + PL_W4_MINIMA);
#pragma GCC unroll 4
        for (int t = 0; t < n; t++) {
            const float step = scales[t * group_stride + g];
            const __m512 offset = _mm512_set1_ps(offsets[t * group_stride + g]);
            total[t] = _mm512_add_ps(total[t], _mm512_mul_ps(_mm512_cvtepi32_ps(dot[t]), _mm512_mul_ps(scale, _mm512_set1_ps(step))));
            total[t] = _mm512_add_ps(total[t], _mm512_mul_ps(minimum, offset));
        }
    }
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(out + t * stride, total[t]);
}

PL_INLINE void w8_tokens(
    const uint8_t *group, int32_t num_groups, const pl_acts *acts, int32_t first, const int n, float *out, int64_t stride)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const int64_t group_stride = acts->k / PL_GROUP;
    const int8_t *q = acts->q + (int64_t)first * acts->stride;
    const float *scales = acts->scale + first * group_stride;
    const int32_t *sums = acts->sum + first * group_stride;
    __m512 total[4];
    for (int t = 0; t < n; t++)
        total[t] = _mm512_setzero_ps();
    for (int32_t g = 0; g < num_groups; g++, group += PL_W8_BYTES) {
        __m512i dot[4];
        for (int t = 0; t < n; t++)
            dot[t] = _mm512_set1_epi32(-128 * sums[t * group_stride + g]);
#pragma GCC unroll 8
        for (int line = 0; line < 8; line++) {
            const __m512i weights = _mm512_xor_si512(_mm512_load_si512(group + 64 * line), sign);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const int8_t *four = q + t * (int64_t)acts->stride + g * PL_GROUP + 4 * line;
                dot[t] = _mm512_dpbusd_epi32(dot[t], weights, _mm512_set1_epi32(pl_load_four(four)));
            }
        }
        const __m512 scale = load_halves(group + PL_W8_SCALES);
#pragma GCC unroll 4
        for (int t = 0; t < n; t++) {
            const __m512 step = _mm512_set1_ps(scales[t * group_stride + g]);
            total[t] = _mm512_add_ps(total[t], _mm512_mul_ps(_mm512_cvtepi32_ps(dot[t]), _mm512_mul_ps(scale, step)));
        }
    }
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(out + t * stride, total[t]);
}

static void tile_w4(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
PL_IN_TOKEN_BLOCKS(w4_tokens)

static void tile_w8(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
PL_IN_TOKEN_BLOCKS(w8_tokens)

static void quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    pl_quantise_x86(x, n, q, scale, sum);
}

const pl_kernels pl_avx512vnni = {
    .name = "avx512vnni",
    .quantise = quantise,
    .tile_w4 = tile_w4,
    .tile_w8 = tile_w8,
    PL_LANES,
};
