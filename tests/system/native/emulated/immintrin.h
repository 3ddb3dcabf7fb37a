/* Stands in for the compiler's immintrin.h: AVX-512 in terms of AVX2, by SIMDe, so that its kernels run on a processor without it. */
#ifndef PL_EMULATED_IMMINTRIN_H
#define PL_EMULATED_IMMINTRIN_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

/* What the library lacks, by halves. */
static inline simde__m512 emulated_cvtepi32_ps(simde__m512i x)
{
    simde__m512i_private in = simde__m512i_to_private(x);
    simde__m512_private out;
    for (int i = 0; i < 2; i++)
        out.m256[i] = simde_mm256_cvtepi32_ps(in.m256i[i]);
    return simde__m512_from_private(out);
}

static inline simde__m512 emulated_cvtph_ps(simde__m256i x)
{
    simde__m512_private out;
    out.m256[0] = simde_mm256_cvtph_ps(simde_mm256_castsi256_si128(x));
    out.m256[1] = simde_mm256_cvtph_ps(simde_mm256_extracti128_si256(x, 1));
    return simde__m512_from_private(out);
}

#define emulated_cvtps_ph(x, rounding)                                                                                     \
    simde_mm256_set_m128i(simde_mm256_cvtps_ph(simde__m512_to_private(x).m256[1], rounding),                               \
        simde_mm256_cvtps_ph(simde__m512_to_private(x).m256[0], rounding))

#define _mm512_cvtepi32_ps(x) emulated_cvtepi32_ps(x)
#define _mm512_cvtph_ps(x) emulated_cvtph_ps(x)
#define _mm512_cvtps_ph(x, rounding) emulated_cvtps_ph(x, rounding)

#endif
