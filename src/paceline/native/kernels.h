/* Inside the library: the functions that exist once per instruction set, and how they are chosen.
 *
 * `portable.c`, `avx2.c`, `avx512vnni.c` and `neon.c` each fill one table; `variant.c` picks one. The float functions are one source,
 * lanes.h, compiled with each instruction set's flags: 16 lanes, no contraction, so all tables give the same bits.
 */
#ifndef PL_KERNELS_H
#define PL_KERNELS_H

#include "paceline_native.h"

/* Activations of T tokens, quantised row by row in groups of 32: value = scale * q, q = -127..127, scale = largest magnitude / 127. */
typedef struct {
    int8_t *q;      /* [T, k], rows 64-byte aligned: stride k rounded up to 64 */
    float *scale;   /* [T, k / 32] */
    int32_t *sum;   /* [T, k / 32] sum of q over the group */
    float *offset;  /* [T, k / 32] scale * (float)sum: how often a minimum counts */
    int32_t k, stride;
} pl_acts;

#define PL_MAX_HEAD_DIM 256
#define PL_ATTEND_QUERIES 64 /* queries of one `attend` */

typedef struct pl_attend pl_attend;

/* A softmax that is not finished: the largest score, the sum of e^(score - maximum), and the values weighted alike [head_dim]. */
typedef struct {
    float maximum, total;
    float *out;
} pl_partial;

typedef struct {
    const char *name;
    /* x [n] -> n / 32 groups; n is a multiple of 32. q = round-half-even(x / scale). Scale and q are 0 where the scale would be below 2^-126,
     * zeros among them; a NaN or an infinity in the group makes the scale that, and q 0: products with it are NaNs. */
    void (*quantise)(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum);
    /* One tile against tokens first .. first + count - 1: out[t * stride + r], t from 0, r from 0 to 15, overwritten. Per group, in order:
     *   acc = acc + (float)dot * (scale_w * scale_a);   W4 then: acc = acc + minimum_w * offset_a. No contraction. */
    void (*tile_w4)(const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride);
    void (*tile_w8)(const uint8_t *tile, int32_t num_groups, const pl_acts *acts, int32_t first, int32_t count, float *out, int32_t stride);
    /* Floats: PL_LANES of lanes.h fills these; see there for each one's order of operations. */
    void (*rms_norm)(const float *x, const float *gain, float eps, int32_t n, float *out);
    void (*silu_mul)(const float *gate, const float *up, int32_t n, float *out);
    void (*rope)(float *head, const float *cosine, const float *sine, int32_t head_dim); /* in place */
    void (*to_half)(const float *x, int32_t n, uint16_t *out);                           /* round half to even */
    /* `num_queries` queries of one KV head against keys first_key .. end_key - 1 (one split), whose slots are pages[key / page_size] ...;
     * query j sees keys up to limits[j] (inclusive). Gives each query's maximum, sum and unnormalised output [head_dim]. */
    void (*attend)(const pl_attend *args);
    void (*merge)(pl_partial *into, const pl_partial *next, int32_t head_dim); /* the keys of `next` follow those of `into` */
} pl_kernels;

struct pl_attend {
    const float *const *queries; /* [num_queries] -> [head_dim], scaled already */
    const int64_t *limits;       /* [num_queries] last key that the query sees */
    const uint16_t *keys, *values; /* this layer's and KV head's [num_slots, head_dim] fp16 */
    const int32_t *pages;        /* of the row, from position 0 */
    int32_t page_size, head_dim, num_queries;
    int64_t first_key, end_key;
    float *maximum, *total; /* [num_queries] */
    float *out;             /* [num_queries, head_dim] */
};

const pl_kernels *pl_current(void);

extern const pl_kernels pl_portable;
#if defined(__x86_64__)
extern const pl_kernels pl_avx2, pl_avx512vnni;
#elif defined(__aarch64__)
extern const pl_kernels pl_neon;
#endif

/* threads.c: phases of tasks, taken by ticket. */
typedef void (*pl_task)(void *context, int32_t task, int32_t thread);
typedef struct {
    pl_task run;
    void *context;
    int32_t num_tasks; /* up to PL_MAX_TASKS; a phase without tasks is passed over */
    int64_t *ended_ns; /* CLOCK_MONOTONIC when the phase ended; NULL: not wanted */
} pl_phase;
#define PL_MAX_TASKS (1 << 21)

/* Runs the phases in order on all threads of the pool: no task of a phase begins before every task of the one before has ended. The
 * calling thread takes part, so a phase ends even if no other thread is given a core. Returns 0, or -2, and nothing was run, if a phase
 * has more than PL_MAX_TASKS. */
int32_t pl_pool_run(pl_pool *pool, const pl_phase *phases, int32_t num_phases);
int32_t pl_pool_threads(const pl_pool *pool);

#endif
