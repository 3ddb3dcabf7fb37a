/* Float functions in 16 lanes: one source, included by the file of every instruction set and compiled with its flags.
 *
 * Lane l of a sum holds elements l, l + 16, l + 32, ...; the lanes are then added 8 apart, 4 apart, 2 apart, 1 apart. Nothing is
 * contracted (-ffp-contract=off), so a register of 4, 8 or 16 floats gives the same bits. A table takes PL_LANES for its entries.
 */
#ifndef PL_LANES_H
#define PL_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__AVX512F__)
#define PL_WIDTH 16 /* floats of one register */
#define PL_EACH(X) X(0)
#elif defined(__AVX2__)
#define PL_WIDTH 8
#define PL_EACH(X) X(0) X(1)
#else
#define PL_WIDTH 4
#define PL_EACH(X) X(0) X(1) X(2) X(3)
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES_FUNCTION static inline __attribute__((always_inline))

typedef float lanes_f __attribute__((vector_size(4 * PL_WIDTH)));
typedef int32_t lanes_i __attribute__((vector_size(4 * PL_WIDTH)));
typedef float lanes_u __attribute__((vector_size(4 * PL_WIDTH), aligned(4), may_alias)); /* anywhere in memory */
typedef float lanes4 __attribute__((vector_size(16)));
typedef int32_t lanes4_i __attribute__((vector_size(16)));
typedef float lanes8 __attribute__((vector_size(32)));
typedef struct {
    lanes_f v[16 / PL_WIDTH];
} lanes16;

#if defined(__clang__)
#define LANES_SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LANES_SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t lanes8_i __attribute__((vector_size(32)));
#define LANES_SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (lanes4_i){__VA_ARGS__})
#define LANES_SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (lanes8_i){__VA_ARGS__})
#endif

LANES_FUNCTION lanes16 lanes_load(const float *x)
{
    lanes16 r;
#define X(i) r.v[i] = *(const lanes_u *)(x + PL_WIDTH * i);
    PL_EACH(X)
#undef X
    return r;
}

LANES_FUNCTION void lanes_store(float *out, lanes16 a)
{
#define X(i) *(lanes_u *)(out + PL_WIDTH * i) = a.v[i];
    PL_EACH(X)
#undef X
}

LANES_FUNCTION lanes16 lanes_splat(float x)
{
    lanes16 r;
#define X(i) r.v[i] = x - (lanes_f){0};
    PL_EACH(X)
#undef X
    return r;
}

LANES_FUNCTION lanes16 lanes_add(lanes16 a, lanes16 b)
{
#define X(i) a.v[i] = a.v[i] + b.v[i];
    PL_EACH(X)
#undef X
    return a;
}

LANES_FUNCTION lanes16 lanes_mul(lanes16 a, lanes16 b)
{
#define X(i) a.v[i] = a.v[i] * b.v[i];
    PL_EACH(X)
#undef X
    return a;
}

/* sum + a * b, each rounded. */
LANES_FUNCTION lanes16 lanes_add_mul(lanes16 sum, lanes16 a, lanes16 b)
{
#define X(i) sum.v[i] = sum.v[i] + a.v[i] * b.v[i];
    PL_EACH(X)
#undef X
    return sum;
}

/* The lanes added 8, 4, 2 and 1 apart. */
static inline float lanes_sum(lanes16 a)
{
    float x[16];
    lanes_store(x, a);
    for (int apart = 8; apart > 0; apart /= 2)
        for (int i = 0; i < apart; i++)
            x[i] = x[i] + x[i + apart];
    return x[0];
}

LANES_FUNCTION lanes4 lanes_larger(lanes4 a, lanes4 b)
{
    const lanes4_i is_larger = a > b;
    return (lanes4)((is_larger & (lanes4_i)a) | (~is_larger & (lanes4_i)b));
}

LANES_FUNCTION float lanes_max(lanes16 a)
{
    union {
        lanes16 whole;
        lanes4 quarter[4];
    } x = {a};
    lanes4 m = lanes_larger(lanes_larger(x.quarter[0], x.quarter[1]), lanes_larger(x.quarter[2], x.quarter[3]));
    m = lanes_larger(m, LANES_SHUFFLE4(m, m, 2, 3, 0, 1));
    m = lanes_larger(m, LANES_SHUFFLE4(m, m, 1, 0, 3, 2));
    return m[0];
}

#if PL_WIDTH >= 8
LANES_FUNCTION lanes4 lanes_four_halves(lanes8 a, lanes8 b, lanes8 c, lanes8 d)
{
    lanes8 ab = LANES_SHUFFLE8(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + LANES_SHUFFLE8(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    lanes8 cd = LANES_SHUFFLE8(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + LANES_SHUFFLE8(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    union {
        lanes8 whole; /* a0 a1 c0 c1 b0 b1 d0 d1 */
        lanes4 half[2];
    } pairs = {LANES_SHUFFLE8(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + LANES_SHUFFLE8(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15)};
    lanes4 even = LANES_SHUFFLE4(pairs.half[0], pairs.half[1], 0, 4, 2, 6);
    lanes4 odd = LANES_SHUFFLE4(pairs.half[0], pairs.half[1], 1, 5, 3, 7);
    return even + odd;
}
#endif

/* lanes_sum of each of four, in the same order of additions. */
LANES_FUNCTION lanes4 lanes_four_sums(lanes16 a, lanes16 b, lanes16 c, lanes16 d)
{
#if PL_WIDTH == 16
    union {
        lanes_f whole;
        lanes8 half[2];
    } p = {a.v[0]}, q = {b.v[0]}, r = {c.v[0]}, s = {d.v[0]};
    return lanes_four_halves(p.half[0] + p.half[1], q.half[0] + q.half[1], r.half[0] + r.half[1], s.half[0] + s.half[1]);
#elif PL_WIDTH == 8
    return lanes_four_halves(a.v[0] + a.v[1], b.v[0] + b.v[1], c.v[0] + c.v[1], d.v[0] + d.v[1]);
#else
    lanes4 p = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]), q = (b.v[0] + b.v[2]) + (b.v[1] + b.v[3]);
    lanes4 r = (c.v[0] + c.v[2]) + (c.v[1] + c.v[3]), s = (d.v[0] + d.v[2]) + (d.v[1] + d.v[3]);
    lanes4 pq = LANES_SHUFFLE4(p, q, 0, 1, 4, 5) + LANES_SHUFFLE4(p, q, 2, 3, 6, 7);
    lanes4 rs = LANES_SHUFFLE4(r, s, 0, 1, 4, 5) + LANES_SHUFFLE4(r, s, 2, 3, 6, 7);
    return LANES_SHUFFLE4(pq, rs, 0, 2, 4, 6) + LANES_SHUFFLE4(pq, rs, 1, 3, 5, 7);
#endif
}

/* e^x within 1 unit in the last place for -87 <= x <= 88; 0 below, e^88 above; e^0 is 1. x = n ln 2 + r with ln 2 in two parts, and
 * e^r = 1 + r + r^2 p(r), p of degree 4 fitted to the relative error over |r| <= ln 2 / 2. */
LANES_FUNCTION lanes16 lanes_exp(lanes16 x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold */
#define X(i)                                                                                                     \
    {                                                                                                            \
        const lanes_f top = 88.0f - (lanes_f){0};                                                                \
        const lanes_i in_range = x.v[i] >= -87.0f, too_large = x.v[i] > top;                                     \
        const lanes_f y = (lanes_f)((too_large & (lanes_i)top) | (~too_large & (lanes_i)x.v[i]));                \
        const lanes_f shifted = y * 1.44269504f + magic, n = shifted - magic;                                    \
        const lanes_f r = (y - n * 0.693359375f) - n * -2.12194440e-4f;                                          \
        lanes_f p = r * 0x1.6a23e8p-10f + 0x1.123a2p-7f;                                                         \
        p = ((p * r + 0x1.5558f2p-5f) * r + 0x1.555492p-3f) * r + 0x1.fffffcp-2f;                                \
        p = (p * (r * r) + r) + 1.0f;                                                                            \
        const lanes_i power = ((lanes_i)shifted << 23) + 0x3f800000;                                             \
        x.v[i] = (lanes_f)(in_range & (lanes_i)(p * (lanes_f)power));                                            \
    }
    PL_EACH(X)
#undef X
    return x;
}

/* 16 fp16 values as float32, exact. */
#if defined(__AVX512F__)
LANES_FUNCTION lanes16 lanes_from_half(const uint16_t *x)
{
    return (lanes16){{(lanes_f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x))}};
}
#elif defined(__F16C__)
LANES_FUNCTION lanes16 lanes_from_half(const uint16_t *x)
{
    return (lanes16){{(lanes_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x)),
        (lanes_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + 8)))}};
}
#elif defined(__aarch64__)
LANES_FUNCTION lanes16 lanes_from_half(const uint16_t *x)
{
    lanes16 r;
#define X(i) r.v[i] = (lanes_f)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)));
    PL_EACH(X)
#undef X
    return r;
}
#else
LANES_FUNCTION lanes16 lanes_from_half(const uint16_t *x)
{
    float out[16];
    for (int i = 0; i < 16; i++) {
        /* As a float32 with the same exponent field the value is 2^112 too small; subnormals come right by the same product. */
        uint32_t bits = (uint32_t)(x[i] & 0x7fff) << 13;
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude *= 0x1p112f;
        memcpy(&bits, &magnitude, 4);
        if ((x[i] & 0x7c00) == 0x7c00) /* infinity; the mantissa of a NaN stays, made quiet */
            bits = 0x7f800000u | (uint32_t)(x[i] & 0x3ff) << 13 | (x[i] & 0x3ff ? 0x400000u : 0u);
        bits |= (uint32_t)(x[i] & 0x8000) << 16;
        memcpy(&out[i], &bits, 4);
    }
    return lanes_load(out);
}
#endif

/* float32 to fp16, round half to even, infinity from 65520 on. */
static inline uint16_t lanes_half_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 rounds to a multiple of 2^-24 */
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

static void lanes_to_half(const float *x, int32_t n, uint16_t *out)
{
    int32_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        out[i] = lanes_half_bits(x[i]);
}

/* x / sqrt(mean of squares + eps) * gain: the sum in 16 lanes, then one reciprocal and two products per element. n % 16 == 0. */
static void lanes_rms_norm(const float *x, const float *gain, float eps, int32_t n, float *out)
{
    lanes16 squares = lanes_splat(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const lanes16 a = lanes_load(x + i);
        squares = lanes_add_mul(squares, a, a);
    }
    const lanes16 factor = lanes_splat(1.0f / sqrtf(lanes_sum(squares) / (float)n + eps));
    for (int32_t i = 0; i < n; i += 16)
        lanes_store(out + i, lanes_mul(lanes_mul(lanes_load(x + i), factor), lanes_load(gain + i)));
}

/* gate / (1 + e^-gate) * up. n % 16 == 0. */
static void lanes_silu_mul(const float *gate, const float *up, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i += 16) {
        const lanes16 g = lanes_load(gate + i), u = lanes_load(up + i);
        lanes16 r;
#define X(j) r.v[j] = -g.v[j];
        PL_EACH(X)
#undef X
        r = lanes_exp(r);
#define X(j) r.v[j] = g.v[j] / (1.0f + r.v[j]) * u.v[j];
        PL_EACH(X)
#undef X
        lanes_store(out + i, r);
    }
}

/* Elements i and i + head_dim / 2 turned by one angle, in place. */
static void lanes_rope(float *head, const float *cosine, const float *sine, int32_t head_dim)
{
    const int32_t half = head_dim / 2;
    float *restrict first = head, *restrict second = head + half;
    for (int32_t i = 0; i < half; i++) {
        const float a = first[i], b = second[i];
        first[i] = a * cosine[i] - b * sine[i];
        second[i] = b * cosine[i] + a * sine[i];
    }
}

#include "attend.h"

#define PL_LANES                                                                                                \
    .rms_norm = lanes_rms_norm, .silu_mul = lanes_silu_mul, .rope = lanes_rope, .to_half = lanes_to_half,       \
    .attend = lanes_attend, .merge = lanes_merge

#endif
