/* Runs every kernel of every instruction set of this processor on made-up numbers, and compares each with the portable one bit by bit.
 *
 * Prints one line per instruction set, with a checksum that is the same on all machines; ends with 1 at the first difference.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { MAX_ROWS = 50, MAX_K = 1536, MAX_TOKENS = 9 };

static pl_pool *pool;
static uint64_t state;
static uint64_t checksum;

static uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static float draw_float(void)
{
    return (float)(int32_t)(draw() - 0x40000000) * 0x1p-28f; /* -4 .. 4, in steps that are exact */
}

static void add_to_checksum(const void *from, size_t num_bytes)
{
    const uint8_t *bytes = from;
    for (size_t i = 0; i < num_bytes; i++)
        checksum = (checksum ^ bytes[i]) * 1099511628211u;
}

static int differ(const char *what, const void *a, const void *b, size_t num_bytes)
{
    add_to_checksum(a, num_bytes);
    if (memcmp(a, b, num_bytes) == 0)
        return 0;
    printf("%s: %s differs from portable\n", pl_variant(), what);
    return 1;
}

/* `name` against portable: 0 if all products agree. */
static int compare_products(const char *name, int32_t format, int32_t rows, int32_t k, int32_t count)
{
    static uint8_t elements[MAX_ROWS * MAX_K];
    static uint16_t scales[MAX_ROWS * MAX_K / PL_GROUP], minima[MAX_ROWS * MAX_K / PL_GROUP];
    static float x[MAX_TOKENS * MAX_K], bias[MAX_ROWS], out[MAX_TOKENS * MAX_ROWS], expected[MAX_TOKENS * MAX_ROWS];
    for (int32_t i = 0; i < rows * k; i++)
        elements[i] = (uint8_t)(format == PL_W4 ? draw() % 16 : draw() % 255 - 127);
    for (int32_t i = 0; i < rows * (k / PL_GROUP); i++) {
        scales[i] = (uint16_t)(draw() % 0x7c00 | draw() % 2 << 15); /* any finite one */
        minima[i] = (uint16_t)(draw() % 0x7c00 | draw() % 2 << 15);
    }
    for (int32_t i = 0; i < count * k; i++)
        x[i] = draw_float();
    for (int32_t i = 0; i < rows; i++)
        bias[i] = draw_float();
    const size_t num_bytes = (size_t)pl_packed_bytes(format, rows, k);
    uint8_t *packed = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (packed == NULL)
        return 1;
    pl_pack(format, rows, k, elements, scales, format == PL_W4 ? minima : NULL, packed);
    const pl_matrix matrix = {.data = packed, .bias = bias, .rows = rows, .k = k, .format = format};
    int failed = pl_force_variant("portable") != 0 || pl_linear(pool, &matrix, x, count, expected) != 0;
    failed |= pl_force_variant(name) != 0 || pl_linear(pool, &matrix, x, count, out) != 0;
    failed = failed || differ(format == PL_W4 ? "a 4-bit product" : "an 8-bit product", out, expected, sizeof(float) * (size_t)(rows * count));
    for (int32_t row = 0; row < rows && !failed; row += 7) {
        pl_unpack_row(&matrix, row, x);
        add_to_checksum(x, sizeof(float) * (size_t)k);
    }
    free(packed);
    return failed;
}

static int compare_quantised(const char *name, float size)
{
    float x[320], scale[10], expected_scale[10];
    int8_t q[320], expected_q[320];
    int32_t sum[10], expected_sum[10];
    for (int32_t i = 0; i < 320; i++)
        x[i] = draw_float() * size;
    pl_force_variant("portable");
    pl_quantise(x, 320, expected_q, expected_scale, expected_sum);
    pl_force_variant(name);
    pl_quantise(x, 320, q, scale, sum);
    return differ("an element", q, expected_q, sizeof q) || differ("a scale", scale, expected_scale, sizeof scale) ||
           differ("a sum", sum, expected_sum, sizeof sum);
}

/* Attention over pages in which keys lie scattered, for queries that see different numbers of them. */
static int compare_attention(const char *name)
{
    enum { NUM_QUERIES = 5, HEAD_DIM = 64, PAGE_SIZE = 16, NUM_PAGES = 6, NUM_SLOTS = PAGE_SIZE * NUM_PAGES };
    static uint16_t keys[NUM_SLOTS * HEAD_DIM], values[NUM_SLOTS * HEAD_DIM];
    static float queries[NUM_QUERIES][HEAD_DIM], maximum[2][NUM_QUERIES], total[2][NUM_QUERIES], out[2][NUM_QUERIES * HEAD_DIM];
    static const int32_t pages[NUM_PAGES] = {3, 0, 5, 1, 4, 2};
    const float *pointers[NUM_QUERIES];
    int64_t limits[NUM_QUERIES];
    for (int32_t i = 0; i < NUM_SLOTS * HEAD_DIM; i++) {
        keys[i] = (uint16_t)(draw() % 0x4000 | draw() % 2 << 15); /* -2 .. 2 */
        values[i] = (uint16_t)(draw() % 0x4000 | draw() % 2 << 15);
    }
    for (int32_t j = 0; j < NUM_QUERIES; j++) {
        pointers[j] = queries[j];
        limits[j] = 70 + 4 * j;
        for (int32_t i = 0; i < HEAD_DIM; i++)
            queries[j][i] = draw_float() * 0.125f;
    }
    for (int32_t run = 0; run < 2; run++) {
        pl_force_variant(run ? name : "portable");
        const pl_attend args = {
            .queries = pointers, .limits = limits, .keys = keys, .values = values, .pages = pages, .page_size = PAGE_SIZE,
            .head_dim = HEAD_DIM, .num_queries = NUM_QUERIES, .first_key = 0, .end_key = 87, .maximum = maximum[run], .total = total[run],
            .out = out[run]};
        pl_current()->attend(&args);
    }
    return differ("a maximum", maximum[1], maximum[0], sizeof maximum[0]) || differ("a sum", total[1], total[0], sizeof total[0]) ||
           differ("attention", out[1], out[0], sizeof out[0]);
}

static int compare_floats(const char *name)
{
    enum { WIDTH = 576, HEAD_DIM = 64 };
    static float x[WIDTH], gain[WIDTH], turns[2][HEAD_DIM / 2], normed[2][WIDTH], gated[2][WIDTH], turned[2][HEAD_DIM];
    static uint16_t halves[2][WIDTH];
    for (int32_t i = 0; i < WIDTH; i++) {
        x[i] = draw_float() * (i % 5 == 0 ? 20.0f : 1.0f);
        gain[i] = draw_float();
    }
    for (int32_t i = 0; i < HEAD_DIM / 2; i++) {
        turns[0][i] = draw_float() * 0.25f;
        turns[1][i] = draw_float() * 0.25f;
    }
    for (int32_t run = 0; run < 2; run++) {
        pl_force_variant(run ? name : "portable");
        const pl_kernels *kernels = pl_current();
        kernels->rms_norm(x, gain, 1e-5f, WIDTH, normed[run]);
        kernels->silu_mul(x, gain, WIDTH, gated[run]);
        kernels->to_half(x, WIDTH, halves[run]);
        memcpy(turned[run], x, sizeof turned[run]);
        kernels->rope(turned[run], turns[0], turns[1], HEAD_DIM);
    }
    return differ("a norm", normed[1], normed[0], sizeof normed[0]) || differ("SiLU", gated[1], gated[0], sizeof gated[0]) ||
           differ("half precision", halves[1], halves[0], sizeof halves[0]) || differ("RoPE", turned[1], turned[0], sizeof turned[0]);
}

enum { HIDDEN = 64, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, VOCAB = 33, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, TOKENS = 150, PAGE = 16 };

/* A small random 4-bit matrix, [rows, k]. */
static pl_matrix small_matrix(int32_t rows, int32_t k, uint8_t *packed)
{
    static uint8_t elements[QKV * HEADS * HEAD_DIM];
    static uint16_t scales[sizeof elements / PL_GROUP], minima[sizeof elements / PL_GROUP];
    for (int32_t i = 0; i < rows * k; i++)
        elements[i] = (uint8_t)(draw() % 16);
    for (int32_t i = 0; i < rows * k / PL_GROUP; i++) {
        scales[i] = (uint16_t)(0x2400 + draw() % 0x200); /* about 1 / 60 */
        minima[i] = (uint16_t)(0xaf00 + draw() % 0x100); /* about -1 / 8 */
    }
    pl_pack(PL_W4, rows, k, elements, scales, minima, packed);
    return (pl_matrix){.data = packed, .rows = rows, .k = k, .format = PL_W4};
}

/* A pass of TOKENS tokens through one layer: its logits to `logits` [TOKENS, VOCAB], keys and values to `kv`. */
static int run_pass(const pl_op *ops, const pl_shape *shape, uint16_t *kv, float *logits)
{
    static int64_t tokens[TOKENS], positions[TOKENS], slots[TOKENS], rows[TOKENS];
    static int32_t pages[TOKENS / PAGE + 1];
    const int32_t query_start[2] = {0, TOKENS}, kv_lens[1] = {TOKENS}, page_start[2] = {0, TOKENS / PAGE + 1};
    for (int32_t i = 0; i <= TOKENS / PAGE; i++)
        pages[i] = TOKENS / PAGE - i;
    for (int32_t i = 0; i < TOKENS; i++) {
        tokens[i] = i * 7 % VOCAB;
        positions[i] = rows[i] = i;
        slots[i] = pages[i / PAGE] * PAGE + i % PAGE;
    }
    const pl_batch batch = {1, TOKENS, TOKENS, PAGE, tokens, positions, slots, rows, query_start, kv_lens, page_start, pages};
    const pl_kv memory = {kv, (TOKENS / PAGE + 1) * PAGE};
    pl_model *model = pl_model_new(shape, ops, 7, TOKENS, TOKENS);
    if (!model)
        return -1;
    const int status = pl_run(pool, model, &batch, &memory, logits, NULL, NULL);
    pl_model_free(model);
    return status;
}

static int compare_passes(const char *name)
{
    enum { NUM_HALVES = 2 * KV_HEADS * (TOKENS / PAGE + 1) * PAGE * HEAD_DIM };
    static _Alignas(64) uint8_t packed[6][QKV * HEADS * HEAD_DIM];
    static float gain[HIDDEN], frequencies[HEAD_DIM / 2], logits[TOKENS * VOCAB], expected[TOKENS * VOCAB];
    static uint16_t kv[NUM_HALVES], expected_kv[NUM_HALVES];
    for (int32_t i = 0; i < HIDDEN; i++)
        gain[i] = 1.0f + draw_float() / 4;
    for (int32_t i = 0; i < HEAD_DIM / 2; i++)
        frequencies[i] = 1.0f / (float)(1 + i * i);
    const pl_matrix table = small_matrix(VOCAB, HIDDEN, packed[0]), qkv = small_matrix(QKV, HIDDEN, packed[1]);
    const pl_matrix out = small_matrix(HIDDEN, HEADS * HEAD_DIM, packed[2]), gate = small_matrix(HIDDEN, HIDDEN, packed[3]);
    const pl_matrix up = small_matrix(HIDDEN, HIDDEN, packed[4]), down = small_matrix(HIDDEN, HIDDEN, packed[5]);
    const pl_op ops[] = {
        {.kind = PL_EMBED, .layer = -1, .first = table},
        {.kind = PL_NORM_QKV_ROPE_WRITE, .first = qkv, .norm = gain, .q_norm = gain, .k_norm = gain},
        {.kind = PL_PAGED_ATTENTION},
        {.kind = PL_OUT_RESIDUAL, .first = out},
        {.kind = PL_NORM_GATE_UP, .first = gate, .second = up, .norm = gain},
        {.kind = PL_DOWN_RESIDUAL, .first = down},
        {.kind = PL_NORM_HEAD, .layer = -1, .first = table, .norm = gain},
    };
    const pl_shape shape = {1, HIDDEN, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, 1e-5f, frequencies};
    int failed = pl_force_variant("portable") != 0 || run_pass(ops, &shape, expected_kv, expected) != 0;
    failed |= pl_force_variant(name) != 0 || run_pass(ops, &shape, kv, logits) != 0;
    return failed || differ("a key or value", kv, expected_kv, sizeof kv) || differ("a pass", logits, expected, sizeof logits);
}

static int compare(const char *name)
{
    static const int32_t shapes[][3] = {{1, 32, 1}, {16, 64, 2}, {50, 576, 9}, {33, 1536, 4}, {17, 1056, 7}, {48, 96, 3}};
    static const float sizes[] = {0.0f, 0x1p-149f, 0x1p-128f, 0x1p-60f, 1.0f, 0x1p100f, 0x1p125f};
    int failed = 0;
    state = 1;
    checksum = 14695981039346656037u;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int32_t format = 0; format < 2 && !failed; format++)
            failed = compare_products(name, format, shapes[i][0], shapes[i][1], shapes[i][2]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !failed; i++)
        failed = compare_quantised(name, sizes[i]);
    failed = failed || compare_floats(name) || compare_attention(name) || compare_passes(name);
    printf("%s %s %016llx\n", name, failed ? "differs" : "agrees", (unsigned long long)checksum);
    return failed;
}

int main(void)
{
    static const char *const names[] = {"portable", "avx2", "avx512vnni", "neon"};
    int failed = 0;
    pool = pl_pool_new(2);
    if (pool == NULL)
        return 2;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (pl_force_variant(names[i]) == 0)
            failed |= compare(names[i]);
    pl_pool_free(pool);
    return failed;
}
