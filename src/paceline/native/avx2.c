/* Products and quantisation for AVX2 with F16C.
 *
 * Four-bit weights are the unsigned operand of vpmaddubsw, activations the signed one: eight of its sums of two products fit in 16 bits
 * (8 * 2 * 15 * 127 = 30,480), so a group needs one widening vpmaddwd per register. Eight-bit weights go in as their magnitudes, and their
 * signs onto the activations; each sum of two products fits (2 * 128 * 127 = 32,512) and is widened by itself. A register is eight rows;
 * both halves of a tile share the broadcast activations, and up to four tokens share the weights.
 *
 * What bounds it on processors with 128-bit units (Zen 1): the one multiplier for integers, then four micro-operations a cycle, loads into
 * registers among them.
 */
#include "lanes.h"
#include "x86.h"

enum {
    BLOCK = 4,  /* tokens at a time: their sums of a group fill the registers */
    CHUNK = 32, /* groups at a time: 17 KB of 8-bit weights, which stay in the first-level cache while all tokens pass */
    AHEAD = 2048,
};

/* Holds a value in a register at this point. Without it the compiler moves the sums of all tokens past each other, and spills. */
#define KEEP(x) __asm__("" : "+x"(x))

/* Up to BLOCK tokens in up to CHUNK groups. */
typedef struct {
    int64_t ahead; /* bytes from what is computed to what is fetched: AHEAD where the weights come from memory, else 0 */
    const int8_t *q[BLOCK];
    const float *step[BLOCK], *offset[BLOCK]; /* pl_acts.scale and .offset */
} operands;

PL_INLINE __m256i load_bytes(const uint8_t *from)
{
    return _mm256_load_si256((const __m256i *)from);
}

/* Loaded first: the conversion from memory takes twice as many micro-operations. */
PL_INLINE __m256 load_halves(const uint8_t *from)
{
    __m128i halves = _mm_loadu_si128((const __m128i *)from);
    KEEP(halves);
    return _mm256_cvtph_ps(halves);
}

/* Ask for a group of weights before they are needed. The processor's own guess of what comes next ends with every page of 4 KB: without
 * this, one token took up to 1.4 times as long. Past the second-level cache, for no weight is read twice from it. */
PL_INLINE void fetch(const uint8_t *group, int32_t num_bytes)
{
    for (int32_t line = 0; line < num_bytes; line += 64)
        _mm_prefetch((const char *)group + line, _MM_HINT_NTA);
}

PL_INLINE __m256i broadcast_four(const int8_t *q)
{
    __m256i four = _mm256_set1_epi32(pl_load_four(q));
    KEEP(four);
    return four;
}

/* One half of a nibble line, rows 0 to 7 in `low` and 8 to 15 in `high`, against inputs `input` .. `input` + 3 of n tokens. */
PL_INLINE void w4_line(__m256i low, __m256i high, const operands *in, const int n, int64_t input, const int fresh, __m256i pairs[BLOCK][2])
{
    KEEP(low);
    KEEP(high);
#pragma GCC unroll 4
    for (int t = 0; t < n; t++) {
        const __m256i q = broadcast_four(in->q[t] + input);
        const __m256i a = _mm256_maddubs_epi16(low, q), b = _mm256_maddubs_epi16(high, q);
        pairs[t][0] = fresh ? a : _mm256_add_epi16(pairs[t][0], a);
        pairs[t][1] = fresh ? b : _mm256_add_epi16(pairs[t][1], b);
        KEEP(pairs[t][0]);
        KEEP(pairs[t][1]);
    }
}

/* Here and below n is a constant where the function is inlined, and `total` has the sums of the groups before. */
PL_INLINE void w4_groups(const uint8_t *group, int32_t num_groups, const operands *in, const int n, __m256 total[BLOCK][2])
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int32_t g = 0; g < num_groups; g++, group += PL_W4_BYTES) {
        fetch(group + in->ahead, PL_W4_BYTES);
        __m256i pairs[BLOCK][2];
#pragma GCC unroll 4
        for (int line = 0; line < 4; line++) {
            __m256i a = load_bytes(group + 64 * line), b = load_bytes(group + 64 * line + 32);
            w4_line(_mm256_and_si256(a, low), _mm256_and_si256(b, low), in, n, g * PL_GROUP + 4 * line, line == 0, pairs);
            KEEP(a);
            KEEP(b);
            a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
            b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
            w4_line(a, b, in, n, g * PL_GROUP + 4 * line + 16, 0, pairs);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256 scale = load_halves(group + PL_W4_SCALES + 16 * half), minimum = load_halves(group + PL_W4_MINIMA + 16 * half);
            KEEP(scale);
            KEEP(minimum);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[t][half], ones));
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(in->step[t][g]));
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(dot, both));
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(minimum, _mm256_set1_ps(in->offset[t][g])));
            }
        }
    }
}

PL_INLINE void w8_groups(const uint8_t *group, int32_t num_groups, const operands *in, const int n, __m256 total[BLOCK][2])
{
    const __m256i ones = _mm256_set1_epi16(1);
    for (int32_t g = 0; g < num_groups; g++, group += PL_W8_BYTES) {
        fetch(group + in->ahead, PL_W8_BYTES);
        __m256i dot[BLOCK][2];
#pragma GCC unroll 8
        for (int line = 0; line < 8; line++) {
            __m256i a = load_bytes(group + 64 * line), b = load_bytes(group + 64 * line + 32);
            KEEP(a);
            KEEP(b);
            __m256i size_a = _mm256_abs_epi8(a), size_b = _mm256_abs_epi8(b);
            KEEP(size_a);
            KEEP(size_b);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const __m256i q = broadcast_four(in->q[t] + g * PL_GROUP + 4 * line);
                const __m256i wide_a = _mm256_madd_epi16(_mm256_maddubs_epi16(size_a, _mm256_sign_epi8(q, a)), ones);
                const __m256i wide_b = _mm256_madd_epi16(_mm256_maddubs_epi16(size_b, _mm256_sign_epi8(q, b)), ones);
                dot[t][0] = line == 0 ? wide_a : _mm256_add_epi32(dot[t][0], wide_a);
                dot[t][1] = line == 0 ? wide_b : _mm256_add_epi32(dot[t][1], wide_b);
                KEEP(dot[t][0]);
                KEEP(dot[t][1]);
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256 scale = load_halves(group + PL_W8_SCALES + 16 * half);
            KEEP(scale);
#pragma GCC unroll 4
            for (int t = 0; t < n; t++) {
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(in->step[t][g]));
                total[t][half] = _mm256_add_ps(total[t][half], _mm256_mul_ps(_mm256_cvtepi32_ps(dot[t][half]), both));
            }
        }
    }
}

/* Groups from .. from + num_groups - 1 of a tile. */
typedef struct {
    const uint8_t *data;
    int32_t from, num_groups;
    int64_t ahead;
} part;

/* n tokens from `first` against a part of a tile; `out` has the sums of the parts before it. */
PL_INLINE void part_product(const part *of, const pl_acts *acts, int32_t first, const int n, float *out, int64_t stride, const int format)
{
    operands in;
    __m256 total[BLOCK][2];
    in.ahead = of->ahead;
    for (int t = 0; t < n; t++) {
        const int64_t at = (int64_t)(first + t) * (acts->k / PL_GROUP) + of->from;
        in.q[t] = acts->q + (int64_t)(first + t) * acts->stride + of->from * PL_GROUP;
        in.step[t] = acts->scale + at;
        in.offset[t] = acts->offset + at;
        for (int half = 0; half < 2; half++)
            total[t][half] = of->from == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(out + t * stride + 8 * half);
    }
    if (format == PL_W4)
        w4_groups(of->data, of->num_groups, &in, n, total);
    else
        w8_groups(of->data, of->num_groups, &in, n, total);
    for (int t = 0; t < n; t++)
        for (int half = 0; half < 2; half++)
            _mm256_storeu_ps(out + t * stride + 8 * half, total[t][half]);
}

PL_INLINE void tile_product(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int64_t stride, const int format)
{
    for (int32_t from = 0; from < num_groups; from += CHUNK) {
        const uint8_t *data = tile + (int64_t)from * (format == PL_W4 ? PL_W4_BYTES : PL_W8_BYTES);
        part of = {.data = data, .from = from, .num_groups = num_groups - from < CHUNK ? num_groups - from : CHUNK, .ahead = AHEAD};
        int32_t t = 0;
        for (; t + 4 <= count; t += 4) {
            part_product(&of, acts, first + t, 4, out + t * stride, stride, format);
            of.ahead = 0;
        }
        if (count - t == 3)
            part_product(&of, acts, first + t, 3, out + t * stride, stride, format);
        else if (count - t == 2)
            part_product(&of, acts, first + t, 2, out + t * stride, stride, format);
        else if (count - t == 1)
            part_product(&of, acts, first + t, 1, out + t * stride, stride, format);
    }
}

static void tile_w4(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    tile_product(tile, num_groups, acts, first, count, out, stride, PL_W4);
}

static void tile_w8(
    const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride)
{
    tile_product(tile, num_groups, acts, first, count, out, stride, PL_W8);
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
