/* Which tokens can still win the coupled choice, argmax(logit / temperature + Gumbel noise): all but a few are ruled out here, and the
 * caller computes those few as it always does. So this decides about time alone, never about a token.
 *
 * The noise is that of speculative/noise.py: Philox4x32-10 (Salmon et al. 2011), counter (output index, token id / 4, 0, 0), key the
 * seed's words, word id % 4 for token id; noise -ln(-ln u), u = (word + 1) / (2^32 + 1). */
#include <math.h>

#include "kernels.h"

#define LANES 16
#define BLOCK 64
#define MOST_NOISE 22.2 /* of 32-bit uniforms: 32 ln 2 and a little */
#define SLACK 1e-9      /* above any difference between two libraries' logarithms */

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__)
/* Integers and comparisons only: the same answers. What chooses a clone runs before ThreadSanitizer, which would look into it, begins. */
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* The words of token ids start .. start + 63, start a multiple of 4. */
WIDE static void philox(uint32_t index, uint32_t start, uint64_t seed, uint32_t words[BLOCK])
{
    uint64_t c0[BLOCK / 4], c1[BLOCK / 4], c2[BLOCK / 4], c3[BLOCK / 4]; /* 32-bit values, as wide as their products */
    for (int j = 0; j < BLOCK / 4; j++) {
        c0[j] = index;
        c1[j] = start / 4 + (uint32_t)j;
        c2[j] = c3[j] = 0;
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        for (int j = 0; j < BLOCK / 4; j++) {
            uint64_t first = (uint64_t)(uint32_t)c0[j] * 0xD2511F53u, second = (uint64_t)(uint32_t)c2[j] * 0xCD9E8D57u;
            c0[j] = (second >> 32) ^ c1[j] ^ k0;
            c1[j] = (uint32_t)second;
            c2[j] = (first >> 32) ^ c3[j] ^ k1;
            c3[j] = (uint32_t)first;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int j = 0; j < BLOCK / 4; j++) {
        words[4 * j] = (uint32_t)c0[j];
        words[4 * j + 1] = (uint32_t)c1[j];
        words[4 * j + 2] = (uint32_t)c2[j];
        words[4 * j + 3] = (uint32_t)c3[j];
    }
}

/* Whether a token of the block may reach `mark` with noise that is no more than a bound: with u = (word + 1) / (2^32 + 1),
 * -ln u >= 1 - u, so the noise is at most ln 2 * (32 - floor(log2(2^32 - word))). 24 bits are exact in a float; its exponent is the
 * logarithm, and of 0, for words so high that the bits are gone, it gives a bound beyond all others. */
WIDE static int may_reach(const float *logits, const uint32_t *words, float temperature, float mark)
{
    int any = 0;
    for (int j = 0; j < BLOCK; j++) {
        union {
            float value;
            int32_t bits;
        } top = {.value = (float)(int32_t)(~words[j] >> 8)};
        float bound = 0.69314724f * (float)(24 + 127 - (top.bits >> 23));
        any |= logits[j] + temperature * bound >= mark;
    }
    return any;
}

WIDE static int any_above(const float *logits, float mark)
{
    int any = 0;
    for (int j = 0; j < BLOCK; j++)
        any |= logits[j] >= mark;
    return any;
}

static double gumbel(uint32_t word)
{
    return -log(-log(((double)word + 1.0) * (1.0 / 4294967297.0)));
}

/* The largest of n logits; NaN or infinity if one is not a number or the largest is not finite. */
WIDE static float largest(const float *logits, int32_t n)
{
    float most[LANES], sum[LANES] = {0};
    for (int j = 0; j < LANES; j++)
        most[j] = -INFINITY;
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
            sum[j] += logits[i + j] * 0.0f; /* NaN from then on for NaN and infinities */
        }
    for (; i < n; i++) {
        most[0] = logits[i] > most[0] ? logits[i] : most[0];
        sum[0] += logits[i] * 0.0f;
    }
    for (int j = 1; j < LANES; j++) {
        most[0] = most[j] > most[0] ? most[j] : most[0];
        sum[0] += sum[j];
    }
    return most[0] + sum[0];
}

typedef struct {
    double best, temperature; /* best: the highest score so far */
    int32_t *ids;
    double *scores;
    int32_t num, capacity;
} contest;

static void keep_contenders(contest *c)
{
    int32_t num = 0;
    for (int32_t i = 0; i < c->num; i++)
        if (c->scores[i] >= c->best - SLACK) {
            c->ids[num] = c->ids[i];
            c->scores[num++] = c->scores[i];
        }
    c->num = num;
}

/* Enter token `id` if it may win; -1 if more tie than there is room for. */
static int enter(contest *c, int32_t id, float logit, uint32_t word)
{
    double score = (double)logit / c->temperature + gumbel(word);
    if (score < c->best - SLACK)
        return 0;
    if (score > c->best)
        c->best = score;
    if (c->num == c->capacity)
        keep_contenders(c);
    if (c->num == c->capacity)
        return -1;
    c->ids[c->num] = id;
    c->scores[c->num++] = score;
    return 0;
}

int32_t pl_argmax(const float *logits, int32_t vocab)
{
    float most = largest(logits, vocab);
    int32_t id = 0;
    if (!isfinite(most))
        return -1;
    while (logits[id] != most)
        id++;
    return id;
}

int32_t pl_contenders(
    const float *logits, int32_t vocab, double temperature, uint64_t seed, uint32_t index, int32_t *ids, double *scores, int32_t capacity)
{
    float most = largest(logits, vocab);
    if (!isfinite(most))
        return -1;
    contest c = {-INFINITY, temperature, ids, scores, 0, capacity};
    uint32_t words[BLOCK];
    /* The likeliest token first: it sets a mark that rules most others out. */
    for (int32_t id = 0; id < vocab; id++)
        if (logits[id] == most) {
            philox(index, (uint32_t)id & ~3u, seed, words);
            c.best = (double)most / temperature + gumbel(words[id & 3]) - SLACK;
            break;
        }
    for (int32_t start = 0; start < vocab; start += BLOCK) {
        int32_t num = vocab - start < BLOCK ? vocab - start : BLOCK;
        /* A little lower than exact: a token too many costs time only. */
        double mark = c.best * temperature - 1e-4 * (1.0 + fabs(c.best) * temperature);
        if (num == BLOCK && !any_above(logits + start, (float)(mark - MOST_NOISE * temperature)))
            continue;
        philox(index, (uint32_t)start, seed, words);
        if (num == BLOCK && !may_reach(logits + start, words, (float)temperature, (float)mark))
            continue;
        for (int32_t j = 0; j < num; j++)
            if (logits[start + j] >= mark - MOST_NOISE * temperature && enter(&c, start + j, logits[start + j], words[j]) < 0)
                return -1;
    }
    keep_contenders(&c);
    return c.num;
}
