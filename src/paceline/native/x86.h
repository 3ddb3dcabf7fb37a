/* What the AVX2 and AVX-512 kernels share. */
#ifndef PL_X86_H
#define PL_X86_H

#include <float.h>
#include <immintrin.h>
#include <string.h>

#include "tiles.h"

#define PL_INLINE static inline __attribute__((always_inline))

/* Four consecutive elements of one token. */
PL_INLINE int32_t pl_load_four(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, sizeof four);
    return four;
}

PL_INLINE int32_t pl_largest_of_eight(__m256i x)
{
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtsi128_si32(y);
}

PL_INLINE int32_t pl_sum_of_eight(__m256i x)
{
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtsi128_si32(y);
}

/* pl_kernels.quantise. Magnitudes compare as integers, and a NaN is above them all; the conversion rounds ties to even. */
PL_INLINE void pl_quantise_x86(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int32_t group = 0; group < n / PL_GROUP; group++, x += PL_GROUP, q += PL_GROUP) {
        __m256 in[4];
        __m256i largest = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            in[i] = _mm256_loadu_ps(x + 8 * i);
            largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(in[i]), magnitude));
        }
        const int32_t bits = pl_largest_of_eight(largest);
        float step;
        memcpy(&step, &bits, sizeof step);
        step /= 127.0f;
        if (step < FLT_MIN)
            step = 0.0f;
        scale[group] = step;
        if (!(step > 0.0f && step <= FLT_MAX)) {
            _mm256_storeu_si256((__m256i *)q, _mm256_setzero_si256());
            sum[group] = 0;
            continue;
        }
        const __m256 divisor = _mm256_set1_ps(step);
        __m256i element[4];
        for (int i = 0; i < 4; i++)
            element[i] = _mm256_cvtps_epi32(_mm256_div_ps(in[i], divisor));
        sum[group] = pl_sum_of_eight(
            _mm256_add_epi32(_mm256_add_epi32(element[0], element[1]), _mm256_add_epi32(element[2], element[3])));
        /* packing works within halves of a register: the last step puts its dwords in order */
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(element[0], element[1]), _mm256_packs_epi32(element[2], element[3]));
        _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
}

#endif
