/* Products and quantisation for AVX2 with F16C.
 *
 * Four-bit weights are the unsigned operand of vpmaddubsw, activations the signed one: eight of its sums of two products fit in 16 bits
 * (8 * 2 * 15 * 127 = 30,480), so a group needs one widening vpmaddwd per register. Eight-bit weights would saturate there; they are taken
 * apart into their even bytes, shifted up, and their odd bytes, as 16-bit numbers 256 times too large, for vpmaddwd: the sum of a group,
 * 256 * 32 * 127 * 127, fits in 32 bits, and one shift makes it exact. Several tokens at a time share what is loaded and taken apart.
 */
#include "lanes.h"
#include "x86.h"

/* Where a token's numbers lie. */
typedef struct {
    const int8_t *q;
    const float *scale;
    const int32_t *sum;
    int64_t q_stride, group_stride; /* from one token to the next */
} tokens;

PL_INLINE tokens tokens_from(const pl_acts *acts, int32_t first)
{
    const int32_t num_groups = acts->k / PL_GROUP;
    const int64_t at = (int64_t)first * num_groups;
    return (tokens){acts->q + (int64_t)first * acts->stride, acts->scale + at, acts->sum + at, acts->stride, num_groups};
}

PL_INLINE __m256 load_halves(const uint8_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

PL_INLINE __m256i load_bytes(const uint8_t *from)
{
    return _mm256_load_si256((const __m256i *)from);
}

/* One tile against n tokens: n is a constant where this is inlined, and `total` stays in registers. */
PL_INLINE void w4_tokens(const uint8_t *group, int32_t num_groups, const tokens in, const int n, float *out, int64_t stride)
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 total[4][2];
    for (int t = 0; t < n; t++)
        total[t][0] = total[t][1] = _mm256_setzero_ps();
    for (int32_t g = 0; g < num_groups; g++, group += PL_W4_BYTES) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i pairs[4];
#pragma GCC unroll 4
            for (int line = 0; line < 4; line++) {
                const __m256i both = load_bytes(group + 64 * line + 32 * half);
                const __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
                for (int t = 0; t < n; t++) {
                    const int8_t *q = in.q + t * in.q_stride + g * PL_GROUP + 4 * line;
                    const __m256i a = _mm256_maddubs_epi16(first, _mm256_set1_epi32(pl_load_four(q)));
                    const __m256i b = _mm256_maddubs_epi16(second, _mm256_set1_epi32(pl_load_four(q + 16)));
                    pairs[t] = line == 0 ? _mm256_add_epi16(a, b) : _mm256_add_epi16(_mm256_add_epi16(pairs[t], a), b);
                }
            }
            const __m256 scale = load_halves(group + PL_W4_SCALES + 16 * half), minimum = load_halves(group + PL_W4_MINIMA + 16 * half);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const float step = in.scale[t * in.group_stride + g];
                const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[t], ones));
                const __m256 offset = _mm256_set1_ps(step * (float)in.sum[t * in.group_stride + g]);
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(step))));
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(minimum, offset));
            }
        }
    }
    for (int t = 0; t < n; t++)
        for (int half = 0; half < 2; half++)
            _mm256_storeu_ps(out + t * stride + 8 * half, total[t][half]);
}

PL_INLINE void w8_tokens(const uint8_t *group, int32_t num_groups, const tokens in, const int n, float *out, int64_t stride)
{
    const __m256i high = _mm256_set1_epi16((int16_t)0xff00);
    __m256 total[4][2];
    for (int t = 0; t < n; t++)
        total[t][0] = total[t][1] = _mm256_setzero_ps();
    for (int32_t g = 0; g < num_groups; g++, group += PL_W8_BYTES) {
        int32_t even[4][8], odd[4][8]; /* the tokens' elements 4 i and 4 i + 2, and 4 i + 1 and 4 i + 3, as pairs of 16 bits */
        for (int t = 0; t < n; t++) {
            const __m256i q = _mm256_loadu_si256((const __m256i *)(in.q + t * in.q_stride + g * PL_GROUP));
            _mm256_storeu_si256((__m256i *)even[t], _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8));
            _mm256_storeu_si256((__m256i *)odd[t], _mm256_srai_epi16(q, 8));
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i dot[4];
            for (int t = 0; t < n; t++)
                dot[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int line = 0; line < 8; line++) {
                const __m256i four = load_bytes(group + 64 * line + 32 * half);
                const __m256i first = _mm256_slli_epi16(four, 8), second = _mm256_and_si256(four, high);
#pragma GCC unroll 4
                for (int t = 0; t < n; t++) {
                    const __m256i a = _mm256_madd_epi16(first, _mm256_set1_epi32(even[t][line]));
                    const __m256i b = _mm256_madd_epi16(second, _mm256_set1_epi32(odd[t][line]));
                    dot[t] = _mm256_add_epi32(_mm256_add_epi32(dot[t], a), b);
                }
            }
            const __m256 scale = load_halves(group + PL_W8_SCALES + 16 * half);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const __m256 step = _mm256_set1_ps(in.scale[t * in.group_stride + g]);
                const __m256 exact = _mm256_cvtepi32_ps(_mm256_srai_epi32(dot[t], 8));
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(exact, _mm256_mul_ps(scale, step)));
            }
        }
    }
    for (int t = 0; t < n; t++)
        for (int half = 0; half < 2; half++)
            _mm256_storeu_ps(out + t * stride + 8 * half, total[t][half]);
}

static void tile_w4(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    int32_t done = 0;
    for (; done + 4 <= count; done += 4)
        w4_tokens(tile, num_groups, tokens_from(acts, first + done), 4, out + (int64_t)done * stride, stride);
    if (done + 2 <= count) {
        w4_tokens(tile, num_groups, tokens_from(acts, first + done), 2, out + (int64_t)done * stride, stride);
        done += 2;
    }
    if (done < count)
        w4_tokens(tile, num_groups, tokens_from(acts, first + done), 1, out + (int64_t)done * stride, stride);
}

static void tile_w8(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    int32_t done = 0;
    for (; done + 4 <= count; done += 4)
        w8_tokens(tile, num_groups, tokens_from(acts, first + done), 4, out + (int64_t)done * stride, stride);
    if (done + 2 <= count) {
        w8_tokens(tile, num_groups, tokens_from(acts, first + done), 2, out + (int64_t)done * stride, stride);
        done += 2;
    }
    if (done < count)
        w8_tokens(tile, num_groups, tokens_from(acts, first + done), 1, out + (int64_t)done * stride, stride);
}

static void quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    pl_quantise_x86(x, n, q, scale, sum);
}

const pl_kernels pl_avx2 = {
    .name = "avx2",
    .quantise = quantise,
    .tile_w4 = tile_w4,
    .tile_w8 = tile_w8,
    PL_LANES,
};
