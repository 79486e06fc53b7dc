// Which kernel makes a product: one pure function a product. Plain C++: tests/variants.cpp holds the table below to what the
// functions say, over their whole range.
//
// Answers (variants of one product give the same bits):
//
//   rows             1                  2 to 8    9 to 64
//   matrix           one | tall | few   few       held | quarters | low quarters | lone | whole | rounds
//
//     one, tall      dense_one.cuh; of a normed row that is not paired: columns a multiple of 1,024 (BF16) or 2,048; tall: more
//                    tiles than a block finishes together, or gate and up
//     few            dense_rows.cuh, where its rows fit into shared memory; rings as deep as the card's blocks allow. Also up to 16 rows of
//                    BF16 that `lone` would take, with up to 16 tiles an SM, on cards with 227 KB
//     step           step_product.cu, 16 or 32 rows a block: the rest, and where there are no products of warpgroups
//     held           dense_held.cu: FP8 and NVFP4 of a norm and 32 chunks of columns, from a tile an SM on
//     quarters       gemm_answer.cu: a cluster of four blocks, for up to eight tiles an SM and 16 rows (NVFP4: nine), unless blocks
//                    of `whole` would have two thirds of the SMs (not NVFP4); low: of half the height, for 17 to 32 rows of BF16 and
//                    NVFP4 and up to a tile an SM; whole: one block for eight tiles; lone: the same for BF16, up to 32 rows and one
//                    such block an SM; rounds: blocks that stay, for more than 32 rows and 16 tiles an SM. Also up to 8 rows where
//                    few does not fit
//
// Answers, mixtures (the same bits again):
//
//   rows             1      2 to 8   9 to 64
//   NVFP4, gate, up  one    few      choosing, a stream; all three choose experts themselves. More than 256 experts, or 8 used:
//                                    choose_experts, then stream
//   NVFP4, down      one    few      stream
//   FP8, warpgroups  as in prompts (as_prompt), whatever the format of down: experts tour
//   other formats    choose_experts, then 16 rows at a time (slices)
//
//   Over ranks one, few and (low) quarters of BF16 and NVFP4, and every down of NVFP4, also add up, if all of their blocks run at
//   once (product_sums, down_sums); after others a kernel does (ops/all_reduce_add.cu).
//
//     NVFP4 that does not fit takes the next kernel to the right, and so do splits that `one` is not compiled for
//     (moe/mixture_shapes.h); a stream that does not fit, slices
//
// Prompts (a matrix is split or not, whatever the rows; then all variants give the same bits):
//
//   not split        wide;  tall: up to 64 tokens and more blocks of wide than multiprocessors
//   split            halves;  short halves: up to 64 tiles, or 192 tokens;  low halves: BF16, up to 64 tiles and more
//                    than one wave of blocks of short halves
//   no warpgroups    middle | many;  split: few up to 64 tokens, and where narrow does not fit, else narrow
//   experts          tour;  no warpgroups, or more experts than it takes: middle up to 20 pairs an expert, many
//
// Attention (answers and prompts differ in their bits; warpgroups and tiles do, too, but no card takes both):
//
//   heads            256, 64 rotated, up to 8 for one of KV                    others
//   answers          split                                                     generic
//   prompts          warpgroups; where these are not, or do not fit: tiles     generic
//   patches          warpgroups for heads of 72; where these are not, and other heads: tiles
//
// Delta rule of prompts, its scan (the same bits): warpgroups; where these are not, or do not fit: tiles
#pragma once

#include "ggml-like/cuda/card.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda {

// ---- answers ----

enum class AnswerProduct { one, tall, few, step, held, quarters, low_quarters, lone, whole, rounds };

/// One part of a matrix times rows of an answer step.
struct AnswerShape {
    pack::Kind kind;
    int rows, tiles, chunks;
    bool normed;  // rows whose norm was deferred: norm_linear
    bool paired;  // gate and up
    int beside;   // bytes of shared memory that the product leaves to a router's tiles
};

AnswerProduct choose(const Card& card, const AnswerShape& shape);

/// Whether the blocks of linear_add's product also do the router's work (moe/route_work.cuh); else a kernel of its own does.
/// `router_tiles`: of 16 logits. The product is the matrix's only part.
bool product_routes(const Card& card, const AnswerShape& shape, int router_tiles);

/// Whether these blocks also add up over ranks, for which there are kernels of BF16 and NVFP4 (comm/tile_sums.cuh). The product is the
/// matrix's only part.
bool product_sums(const Card& card, const AnswerShape& shape);

// ---- answers: mixtures ----

enum class MixtureProduct { one, few, choosing, stream, slices };

/// The experts' and the shared expert's matrices of one op.
struct MixtureShape {
    pack::Kind experts_kind, shared_kind;
    int rows, used, experts;
    int tiles, shared_tiles;    // of one expert, of the shared one
    int chunks, shared_chunks;  // of their columns
    int height;                 // rows of one expert's matrix
};

MixtureProduct choose_gate_up(const Card& card, const MixtureShape& shape);
MixtureProduct choose_down(const Card& card, const MixtureShape& shape);
/// Whether an answer's mixture is made as a prompt's are, with the same bits: experts whose gate and up are FP8, where the tour takes them.
bool as_prompt(const Card& card, pack::Kind gate_up, int experts);
/// Whether the blocks of this choice of choose_down also add up over ranks.
bool down_sums(const Card& card, const MixtureShape& shape);
/// Whether up to 64 rows fit a stream, of answers or of prompts. gate and up: the shared expert may be of another format.
bool gate_up_streams(const Card& card, const MixtureShape& shape);
bool down_streams(const Card& card, const MixtureShape& shape);

// ---- prompts ----

enum class PromptProduct { wide, tall, halves, short_halves, low_halves, many, middle, narrow, few };

/// A part of a matrix times rows of prompts.
struct PromptShape {
    pack::Kind kind;
    int tokens, tiles, chunks;
    bool may_split;  // products of experts and of paired matrices never do
};

/// Few rows and many columns: too few blocks would share the weights of a short prompt. Depends on the matrix alone.
bool is_split(const PromptShape& shape);
PromptProduct choose(const Card& card, const PromptShape& shape);

// ---- prompts: chosen experts ----

enum class ExpertsProduct { tour, middle, many };

/// `pairs` of a token and an expert.
struct ExpertsShape {
    pack::Kind kind;
    int64_t pairs;
    int experts;
};

ExpertsProduct choose(const Card& card, const ExpertsShape& shape);

// ---- attention ----

enum class AttentionProduct { split, warpgroups, tiles, generic };

struct AttentionShape {
    int heads, kv_heads, head_dim, rotary_dims;
    bool answers;
};

AttentionProduct choose(const Card& card, const AttentionShape& shape);

/// Among the patches of an image.
enum class GridProduct { warpgroups, tiles };

struct GridShape {
    int head_dim;
};

GridProduct choose(const Card& card, const GridShape& shape);

// ---- delta rule ----

/// The scan of prompts.
enum class ScanProduct { warpgroups, tiles };

ScanProduct choose_scan(const Card& card);

/// For messages and bench --ops; those of answers and of attention for the tests of choices.
const char* name_of(AnswerProduct product);
const char* name_of(MixtureProduct product);
const char* name_of(PromptProduct product);
const char* name_of(ExpertsProduct product);
const char* name_of(AttentionProduct product);
const char* name_of(GridProduct product);
const char* name_of(ScanProduct product);

}  // namespace quern::cuda
