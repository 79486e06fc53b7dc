// Batch: how the rows of a step belong to sequences. Shared by every op that looks beyond its own row.
//
// A step runs T rows (tokens) of S sequences. Rows of one sequence are neighbours, in order; sequence s owns
// rows start[s] .. start[s+1]-1 (none if equal). Rows from start[S] on are padding: computed or not, never read
// (the CPU's ops that look at sequences write zeros there). A sequence whose first row has position 0 begins from
// zero state, whatever its slot held before.
//
// A step has one kind. Prompt rows and answer rows take two numeric paths. Each gives a row the same bits, whatever
// else runs in its step:
//   prompt   a row's bits depend only on its sequence's tokens up to it, provided that all slices of the sequence so
//            far ended at multiples of 64 tokens, the last one excepted
//   answer   one or several consecutive rows a sequence; a row has the bits that it has alone, one row a step
//
// Speculation: a slot's recurrent state is the state after its last committed token. With journal[s] = 1 a
// step leaves that state alone and writes one journal entry a row instead; the next step first applies the
// first committed[s] of those entries (the accepted tokens), then runs its rows. Without speculation both are
// 0.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

inline constexpr int kPageTokens = 64;  // tokens in one page of the KV cache

/// Rows of prompts or rows of answers; a step never has both.
enum class StepKind : uint8_t { prompt, answer };

struct Batch {
    StepKind kind = StepKind::prompt;
    Tensor* token_ids = nullptr;     // I32 [T]
    Tensor* positions = nullptr;     // I32 [T] position of each row in its sequence
    Tensor* row_sequence = nullptr;  // I32 [T] sequence of each row; -1: padding
    Tensor* start = nullptr;         // I32 [S+1]
    Tensor* slots = nullptr;         // I32 [S] state slot of each sequence
    Tensor* pages = nullptr;         // I32 [S, P] page p holds positions 64p .. 64p+63
    Tensor* committed = nullptr;     // I32 [S] journal entries to apply first
    Tensor* journal = nullptr;       // I32 [S] 1: journal this step instead of updating the state
    Tensor* logit_rows = nullptr;    // I32 [R] rows whose logits are wanted; with R rows in all: 0..R-1
    Tensor* temperature = nullptr;   // F32 [R] what logits_top ranks and sums up
    /// Of prompts: I32 [S] the first row of each sequence whose logits are wanted, as are those of all after it; start[s+1]: none.
    Tensor* logits_from = nullptr;
    Tensor* follows =
        nullptr;  // I32 [S] 1: rows begin after what the last step chose (ops/follow_choice.h). Null: never
    Tensor* draft_source =
        nullptr;  // I32 [T] where embed finds the id of a row that only the device knows; -1: in token_ids. Null: never
    // Of models that read images; else null.
    Tensor* rope =
        nullptr;  // I32 [3, T] by what q and k of each row rotate: time, row and column; null: positions
    Tensor* image_source =
        nullptr;  // I32 [T] the row of image_rows that is a row's embedding; -1: that of token_ids
    Tensor* image_rows = nullptr;  // F32 [I, D]
};

}  // namespace quern
