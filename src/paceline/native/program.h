/* A model's program: its ops as stages, each a phase of tasks, and the memory they share. program.c makes and runs it. */
#ifndef PL_PROGRAM_H
#define PL_PROGRAM_H

#include "tiles.h"

#define PL_SPLIT_KEYS 64 /* keys of one split of attention, at absolute multiples; part of what defines a result */

typedef struct stage stage;

/* One phase of an op. `count`: its tasks in the pass that is being prepared. */
struct stage {
    pl_model *model;
    const pl_op *op;
    int32_t (*count)(const stage *self);
    pl_task run; /* its context is the stage */
};

/* Query tokens of one row that attend together to splits first_split .. end_split - 1. */
typedef struct {
    int32_t row, first_token, num_tokens;
    int32_t first_split, end_split;
} attend_item;

/* A token whose splits are computed apart, and then merged. */
typedef struct {
    int32_t token, num_splits;
} split_token;

typedef struct {
    attend_item *items; /* [num_items]; a task is one of them for one KV head */
    int32_t num_items, max_items;
    split_token *split_tokens; /* [num_split_tokens] */
    int32_t num_split_tokens;
    int64_t *first_partial; /* [T] of a split token: split s of head h is first_partial + s * num_heads + h; else -1 */
    pl_partial *partials;
    float *partial_values; /* [max_partials, head_dim] */
    int64_t max_partials;
} attend_plan;

struct pl_model {
    pl_shape shape;
    pl_op *ops;
    stage *stages;
    pl_phase *phases;
    int64_t *ended_ns; /* by phase */
    int32_t num_ops, num_stages;
    int32_t max_tokens, max_logits;
    /* Scratch memory. */
    float *frequencies;
    float *cosines, *sines; /* [T, head_dim / 2] of the tokens' positions */
    float *own_stream;      /* [T, hidden] if the caller wants no hidden states */
    float *norm_rows;       /* [T, hidden] */
    float *qkv;             /* [T, (num_heads + 2 num_kv_heads) * head_dim] */
    float *attended;        /* [T, num_heads * head_dim] */
    pl_acts normed;         /* k = hidden, after a norm */
    pl_acts mixed;          /* k = num_heads * head_dim, what attention gives */
    pl_acts gated;          /* k = intermediate, what gate and up give */
    attend_plan plan;
    /* The pass that is going on. */
    const pl_kernels *kernels;
    const pl_batch *batch;
    pl_kv kv;
    float *stream; /* [T, hidden] */
    float *logits;
};

/* attention.c */
int32_t plan_attention(pl_model *model, int32_t num_threads); /* 0, or -1 without memory */
int32_t count_attend(const stage *self);
void attend(void *context, int32_t task, int32_t thread);
int32_t count_merge(const stage *self);
void merge_splits(void *context, int32_t task, int32_t thread);

/* stages.c: the others, by op. Returns how many stages were written to `stages`, at most MAX_OP_STAGES. */
#define MAX_OP_STAGES 2
int32_t stages_of(pl_model *model, const pl_op *op, stage *stages);

/* rotation.c: cosine and sine of an angle in radians, both within 1 unit in the last place for |angle| < 2^20, by products and sums of
 * double precision alone: the same bits whatever the mathematical library. */
void turn_by(float angle, float *cosine, float *sine);

#endif
