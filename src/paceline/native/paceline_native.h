/* The CPU step in C: what Python calls (forward/native.py through native/library.py).
 *
 * Raw pointers and sizes only; every size was checked on the Python side, so C asserts nothing about input. All functions are safe to
 * call without Python's lock; one `pl_run` at a time per pool. Integer results are the same on every instruction set, and float
 * results too: no contraction, sums in one fixed order (docs/decisions/0013-native-step.md).
 */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stdint.h>

#define PL_ABI 2          /* library.py refuses another number */
#define PL_TILE_ROWS 16   /* output rows that are packed and computed together */
#define PL_GROUP 32       /* consecutive inputs that share a scale, of weights and of activations alike */

/* Weight formats. A matrix [rows, k] is ceil(rows / 16) tiles, one after the other; a tile is k / 32 groups, one after the other; so one
 * product reads one sequential stream. Rows beyond `rows` are zeros. Element (row r, input i) of a group, q = i / 4:
 *   PL_W4, 320 bytes: 256 bytes in four lines of 64, byte 4 r + i % 4 of line q % 4 holds the element in its low half for q < 4 and in its
 *     high half for q >= 4, as 0..15; then 16 fp16 scales, then 16 fp16 minima, by row. Value = scale * element + minimum.
 *   PL_W8, 544 bytes: 512 bytes in eight lines of 64, byte 4 r + i % 4 of line q holds the element as int8, -127..127; then 16 fp16 scales.
 *     Value = scale * element.
 */
enum pl_format { PL_W8 = 0, PL_W4 = 1 };

typedef struct {
    const uint8_t *data; /* packed, 64-byte aligned; mapped from a file as a rule */
    const float *bias;   /* [rows] or NULL */
    int32_t rows, k;     /* k is a multiple of 32 */
    int32_t format;      /* pl_format */
    int32_t reserved;
} pl_matrix;

/* Operations in the order of core/program.py's OpKind. */
enum pl_kind {
    PL_EMBED = 0,
    PL_NORM_QKV_ROPE_WRITE,
    PL_PAGED_ATTENTION,
    PL_OUT_RESIDUAL,
    PL_NORM_GATE_UP,
    PL_DOWN_RESIDUAL,
    PL_NORM_HEAD,
    PL_NUM_KINDS
};

typedef struct {
    int32_t kind;
    int32_t layer;        /* -1 outside the layers */
    pl_matrix first;      /* embed: table; qkv: q, k and v rows one after the other; out; gate; down; head */
    pl_matrix second;     /* up; else all zero */
    const float *norm;    /* [hidden] RMSNorm gain of qkv, gate_up and head */
    const float *q_norm;  /* [head_dim] RMSNorm gain over every q head, or NULL (qwen3) */
    const float *k_norm;
} pl_op;

typedef struct {
    int32_t num_layers;
    int32_t hidden, intermediate;    /* multiples of 32 */
    int32_t num_heads, num_kv_heads; /* num_heads is a multiple of num_kv_heads; up to 64 heads share one KV head */
    int32_t head_dim;                /* a multiple of 16, up to 256; num_heads / num_kv_heads * head_dim is a multiple of 32 */
    int32_t vocab;
    float eps;
    const float *frequencies; /* [head_dim / 2] radians per position; element i pairs with i + head_dim / 2 */
} pl_shape;

/* One pass: B rows of T tokens. Row b owns tokens query_start[b] .. query_start[b + 1] - 1, the last of its kv_lens[b] tokens. */
typedef struct {
    int32_t num_rows, num_tokens, num_logits, page_size;
    const int64_t *token_ids;   /* [T] */
    const int64_t *positions;   /* [T] */
    const int64_t *write_slots; /* [T] page * page_size + offset */
    const int64_t *logit_rows;  /* [num_logits] indices into T */
    const int32_t *query_start; /* [B + 1] */
    const int32_t *kv_lens;     /* [B] */
    const int32_t *page_start;  /* [B + 1] where row b's pages begin in page_ids */
    const int32_t *page_ids;
} pl_batch;

/* KV memory [num_layers, 2, num_kv_heads, num_slots, head_dim] fp16: keys, then values (docs/decisions/0003-kv-layout.md). */
typedef struct {
    uint16_t *data;
    int64_t num_slots;
} pl_kv;

typedef struct pl_pool pl_pool;   /* threads; the caller is one of them */
typedef struct pl_model pl_model; /* a program bound to its weights, with its scratch memory */

#pragma GCC visibility push(default) /* the library shows these functions and no others */

int32_t pl_abi(void);
const char *pl_variant(void); /* "avx512vnni", "avx2", "neon" or "portable": what this CPU runs, unless forced */
int32_t pl_force_variant(const char *name); /* 0, or -1 if this CPU or build lacks it; for tests, before any run */

pl_pool *pl_pool_new(int32_t num_threads); /* NULL if memory or threads cannot be had */
void pl_pool_free(pl_pool *pool);

/* Copies shape, ops and frequencies; weights, norms and biases stay where they are and must outlive the model. NULL without memory. */
pl_model *pl_model_new(const pl_shape *shape, const pl_op *ops, int32_t num_ops, int32_t max_tokens, int32_t max_logits);
void pl_model_free(pl_model *model);

/* Run one pass: KV written, logits [num_logits, vocab] and hidden [T, hidden] (NULL: not wanted; before the final norm) filled.
 * T <= max_tokens and num_logits <= max_logits. Adds each op kind's time to profile_ns [PL_NUM_KINDS] unless NULL. Returns 0, -1
 * without memory, or -2 if a phase has more tasks than can be counted; nothing was run then. */
int32_t pl_run(pl_pool *pool, pl_model *model, const pl_batch *batch, const pl_kv *kv, float *logits, float *hidden, int64_t *profile_ns);

/* Packing, at load. `elements` [rows, k]: 0..15 (PL_W4) or int8 (PL_W8); scales and minima
 * [rows, k / 32] as fp16 bits, minima NULL for W8. */
int64_t pl_packed_bytes(int32_t format, int32_t rows, int32_t k);
void pl_pack(
    int32_t format, int32_t rows, int32_t k, const uint8_t *elements, const uint16_t *scales, const uint16_t *minima, uint8_t *packed);

/* One row of a packed matrix as float32 [k], scale * element + minimum: two roundings. */
void pl_unpack_row(const pl_matrix *matrix, int32_t row, float *out);

/* Activations as the products take them (kernels.h, pl_kernels.quantise), for tests: q [n], scale and sum [n / 32] of x [n], n a multiple
 * of 32. */
void pl_quantise(const float *x, int32_t n, int8_t *q, float *scale, int32_t *sum);

/* The product alone, for tests, `doctor` and benchmarks: out [num_rows, matrix->rows] of x [num_rows, k]. Returns as
 * pl_run does. */
int32_t pl_linear(pl_pool *pool, const pl_matrix *matrix, const float *x, int32_t num_rows, float *out);

/* Sampling: the ids of the tokens that can win argmax(logit / temperature + noise) over logits [vocab], in rising order, into ids
 * [capacity]; scores [capacity] is scratch. The noise is that of speculative/noise.py. Returns their number, or -1 if they do not fit or
 * logits are not finite. temperature > 0, capacity > 0. */
int32_t pl_contenders(
    const float *logits, int32_t vocab, double temperature, uint64_t seed, uint32_t index, int32_t *ids, double *scores, int32_t capacity);

/* The lowest id of the largest of logits [vocab], or -1 if one of them is not finite. */
int32_t pl_argmax(const float *logits, int32_t vocab);

#pragma GCC visibility pop

#endif
