#include "ggml-like/cuda/variants.h"

#include "ggml-like/cuda/attention/grid_shapes.h"
#include "ggml-like/cuda/attention/split.h"
#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/delta/chunks.h"
#include "ggml-like/cuda/linear/dense_shapes.h"
#include "ggml-like/cuda/linear/gemm_shapes.h"
#include "ggml-like/cuda/linear/held_shapes.h"
#include "ggml-like/cuda/linear/warpgroup_shapes.h"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/moe/mixture_shapes.h"

namespace quern::cuda {
namespace {

using namespace linear;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class S>
int64_t blocks(const PromptShape& p) {
    return ceil_div(p.tiles, S::kTiles) * ceil_div(p.tokens, S::kTokens);
}
/// Nine blocks for ten multiprocessors.
template <class S>
bool fills(const Card& card, const PromptShape& p) {
    return 10 * blocks<S>(p) >= 9 * int64_t{card.sms};
}

/// With as few stages as a pipeline needs.
template <class S>
bool fits(const Card& card, Kind kind) {
    const int bytes = kind == Kind::bf16  ? gemm_shared<Kind::bf16, S>(2)
                      : kind == Kind::fp8 ? gemm_shared<Kind::fp8, S>(2)
                                          : gemm_shared<Kind::nvfp4, S>(2);
    return bytes <= card.shared_bytes;
}

bool takes_warpgroups(const Card& card, Kind kind) {
    if (kind == Kind::bf16) return warpgroups_fit<Kind::bf16, Wide>(card);
    return kind == Kind::fp8 ? warpgroups_fit<Kind::fp8, Wide>(card)
                             : warpgroups_fit<Kind::nvfp4, Wide>(card);
}

PromptProduct choose_warpgroups(const Card& card, const PromptShape& p) {
    constexpr int kFewTokens = 64;
    if (is_split(p)) {
        const bool low = p.tiles <= kLowTiles;
        using Short = ShortHalves<Kind::bf16>;
        if (low && p.kind == Kind::bf16 &&
            kPromptSplits * blocks<Short>(p) > int64_t{Short::kBlocksPerSm} * card.sms)
            return PromptProduct::low_halves;
        return low || p.tokens <= 3 * kFewTokens ? PromptProduct::short_halves : PromptProduct::halves;
    }
    // Where all blocks of wide run at once, they are cut to fewer rows. With more blocks, tall has two on a multiprocessor, which overlap.
    const bool few = p.tokens <= kFewTokens && blocks<Wide>(p) > card.sms;
    return few ? PromptProduct::tall : PromptProduct::wide;
}

}  // namespace

namespace {

bool takes_quarters(const Card& card, const AnswerShape& s) {
    const bool codes = s.kind == Kind::nvfp4;  // instructions, not bytes: best spread over all SMs
    if (s.tiles * ceil_div(s.rows, 16) > (codes ? 9 : 8) * card.sms) return false;
    using Blocks = Whole<Kind::bf16>;
    return codes || 3 * ceil_div(s.tiles, Blocks::kTiles) * ceil_div(s.rows, Blocks::kTokens) < 2 * card.sms;
}

/// Rows that dense_rows.cuh takes. Compiled for those of two products is BF16 of a norm that is not paired: faster than `lone`; of a
/// head's many tiles the sums of so many rows would meet at too many barriers.
int most_few_rows(const Card& card, const AnswerShape& s) {
    const bool two = s.kind == Kind::bf16 && s.normed && !s.paired && dense_is_deep(card);
    return two && s.tiles <= 16 * card.sms && !takes_quarters(card, s) ? 2 * kPassRows : kPassRows;
}

}  // namespace

AnswerProduct choose(const Card& card, const AnswerShape& s) {
    if (s.rows <= most_few_rows(card, s) && dense_rows_fit(card, s.kind, s.rows, s.chunks, s.beside)) {
        const auto one = [&](Extent extent) {
            return s.rows == 1 &&
                   dense_one_fits(card, s.kind, s.normed, s.paired, extent, s.tiles, s.chunks, s.beside);
        };
        if (one(Extent::few)) return AnswerProduct::one;
        if (s.normed && one(Extent::many)) return AnswerProduct::tall;
        return AnswerProduct::few;
    }
    const bool warpgroups = s.kind == Kind::bf16  ? answers_fit<Kind::bf16>(card, s.chunks)
                            : s.kind == Kind::fp8 ? answers_fit<Kind::fp8>(card, s.chunks)
                                                  : answers_fit<Kind::nvfp4>(card, s.chunks);
    if (!warpgroups) return AnswerProduct::step;
    if (s.normed && !s.paired && s.kind != Kind::bf16 && held_fits(card, s.kind, s.tiles, s.chunks))
        return AnswerProduct::held;
    if (takes_quarters(card, s)) {
        const bool low = s.kind != Kind::fp8 && s.rows > 16 && s.rows <= LowQuarters<Kind::bf16>::kTokens;
        return low && s.tiles <= card.sms ? AnswerProduct::low_quarters : AnswerProduct::quarters;
    }
    using Blocks = Lone<Kind::bf16>;
    if (s.kind == Kind::bf16 && s.rows <= Blocks::kTokens && ceil_div(s.tiles, Blocks::kTiles) <= card.sms)
        return AnswerProduct::lone;
    const bool many = s.rows > Whole<Kind::bf16>::kTokens && s.tiles > 16 * card.sms;
    return many ? AnswerProduct::rounds : AnswerProduct::whole;
}

bool product_routes(const Card& card, const AnswerShape& s, int router_tiles) {
    AnswerShape shape = s;
    shape.beside = router_tiles * kRouterTileBytes;
    const AnswerProduct product = choose(card, shape);
    const bool few = product == AnswerProduct::one || product == AnswerProduct::few;
    return few && router_tiles <= kRouterTiles && warps_per_tile(pieces_for(s.kind, s.chunks)) == kWarps &&
           s.tiles <= kOwnTiles * card.sms;
}

namespace {

/// At once: blocks that wait for other ranks must.
template <class S>
bool all_run(const Card& card, const AnswerShape& s) {
    const int64_t blocks = ceil_div(s.tiles, S::kTiles) * ceil_div(s.rows, S::kTokens) * S::kCluster;
    return blocks <= int64_t{S::kBlocksPerSm} * card.sms;
}

}  // namespace

bool product_sums(const Card& card, const AnswerShape& s) {
    const AnswerProduct product = choose(card, s);
    if (s.kind == Kind::fp8 || s.tiles > comm::kSumTiles || s.rows > comm::kSumRows) return false;
    if (product == AnswerProduct::quarters) return all_run<Quarters<Kind::bf16>>(card, s);
    if (product == AnswerProduct::low_quarters) return all_run<LowQuarters<Kind::bf16>>(card, s);
    return product == AnswerProduct::one || product == AnswerProduct::few;
}

bool gate_up_streams(const Card& card, const MixtureShape& m) {
    moe::StreamShape stream(m.chunks, m.shared_chunks, 0);
    return m.experts_kind == Kind::nvfp4 && m.rows <= moe::kMaxFp4Rows &&
           m.rows * m.used <= moe::kGroupPairs && fit_stream(stream, card.shared_bytes - moe::kStatic);
}
bool down_streams(const Card& card, const MixtureShape& m) {
    return m.shared_kind == Kind::nvfp4 && m.height % 4 == 0 && gate_up_streams(card, m);
}

MixtureProduct choose_gate_up(const Card& card, const MixtureShape& m) {
    if (m.shared_kind != Kind::nvfp4 || !gate_up_streams(card, m)) return MixtureProduct::slices;
    if (m.experts > moe::kMaxChoiceExperts || m.used > moe::kMaxChoiceUsed) return MixtureProduct::stream;
    if (m.tiles == 0 || m.shared_tiles == 0) return MixtureProduct::choosing;
    if (m.rows == 1 && moe::GateUpOneLaunch(card, m.used, m.tiles, m.shared_tiles, m.chunks).fits(card))
        return MixtureProduct::one;
    const moe::GateUpFewLaunch few(card, m.rows, m.used, m.tiles, m.shared_tiles, m.chunks);
    return few.fits(card, m.rows) ? MixtureProduct::few : MixtureProduct::choosing;
}

MixtureProduct choose_down(const Card& card, const MixtureShape& m) {
    if (m.experts_kind != Kind::nvfp4 || m.shared_kind != Kind::nvfp4) return MixtureProduct::slices;
    if (m.rows == 1 && moe::down_one_launch(card, m.used, m.chunks, m.shared_chunks).fits)
        return MixtureProduct::one;
    if (moe::DownFewLaunch(card, m.rows, m.used, m.chunks, m.shared_chunks).fits) return MixtureProduct::few;
    return down_streams(card, m) ? MixtureProduct::stream : MixtureProduct::slices;
}

bool as_prompt(const Card& card, Kind gate_up, int experts) {
    return gate_up == Kind::fp8 && moe::tour_fits<Kind::fp8>(card, experts);
}

/// Of few rows a block has one tile, and those that wait for other ranks must all be resident.
bool down_sums(const Card& card, const MixtureShape& m) {
    const MixtureProduct product = choose_down(card, m);
    if (product == MixtureProduct::stream) return int64_t{m.rows} * m.height <= 2 * comm::kSmallPairs;
    const bool few = product == MixtureProduct::one || product == MixtureProduct::few;
    return few && m.tiles <= std::min(card.sms, comm::kSumTiles) && m.rows <= comm::kSumRows;
}

bool is_split(const PromptShape& p) { return p.may_split && p.tiles <= 256 && p.chunks >= 16; }

PromptProduct choose(const Card& card, const PromptShape& p) {
    if (takes_warpgroups(card, p.kind)) return choose_warpgroups(card, p);
    if (is_split(p))
        return p.tokens > 64 && fits<Narrow>(card, p.kind) ? PromptProduct::narrow : PromptProduct::few;
    return p.tokens > 64 && fills<Many>(card, p) ? PromptProduct::many : PromptProduct::middle;
}

ExpertsProduct choose(const Card& card, const ExpertsShape& e) {
    const bool warpgroups = e.kind == Kind::bf16  ? moe::tour_fits<Kind::bf16>(card, e.experts)
                            : e.kind == Kind::fp8 ? moe::tour_fits<Kind::fp8>(card, e.experts)
                                                  : moe::tour_fits<Kind::nvfp4>(card, e.experts);
    if (warpgroups) return ExpertsProduct::tour;
    return e.pairs <= 20 * int64_t{e.experts} ? ExpertsProduct::middle : ExpertsProduct::many;
}

AttentionProduct choose(const Card& card, const AttentionShape& a) {
    const bool fast = a.head_dim == attention::kSplitHeadDim &&
                      a.rotary_dims == attention::kSplitRotaryDims &&
                      a.heads / a.kv_heads <= attention::kSplitGroup;
    if (!fast) return AttentionProduct::generic;
    if (a.answers) return AttentionProduct::split;
    return card.warpgroups && card.shared_bytes >= attention::kWarpgroupShared ? AttentionProduct::warpgroups
                                                                               : AttentionProduct::tiles;
}

GridProduct choose(const Card& card, const GridShape& g) {
    const bool fits = card.warpgroups && card.shared_bytes >= attention::kGridShared;
    return fits && g.head_dim == attention::kGridWidth ? GridProduct::warpgroups : GridProduct::tiles;
}

ScanProduct choose_scan(const Card& card) {
    return card.warpgroups && card.shared_bytes >= delta::kWarpgroupScanBytes ? ScanProduct::warpgroups
                                                                              : ScanProduct::tiles;
}

const char* name_of(AnswerProduct product) {
    switch (product) {
        case AnswerProduct::one:
            return "one";
        case AnswerProduct::tall:
            return "tall";
        case AnswerProduct::few:
            return "few";
        case AnswerProduct::step:
            return "step";
        case AnswerProduct::held:
            return "held";
        case AnswerProduct::quarters:
            return "quarters";
        case AnswerProduct::low_quarters:
            return "low quarters";
        case AnswerProduct::lone:
            return "lone";
        case AnswerProduct::whole:
            return "whole";
        default:
            return "rounds";
    }
}
const char* name_of(MixtureProduct product) {
    switch (product) {
        case MixtureProduct::one:
            return "one";
        case MixtureProduct::few:
            return "few";
        case MixtureProduct::choosing:
            return "choosing";
        case MixtureProduct::stream:
            return "stream";
        default:
            return "slices";
    }
}
const char* name_of(PromptProduct product) {
    switch (product) {
        case PromptProduct::wide:
            return "gemm wide";
        case PromptProduct::tall:
            return "gemm tall";
        case PromptProduct::halves:
            return "gemm halves";
        case PromptProduct::short_halves:
            return "gemm short halves";
        case PromptProduct::low_halves:
            return "gemm low halves";
        case PromptProduct::many:
            return "gemm many";
        case PromptProduct::middle:
            return "gemm middle";
        case PromptProduct::narrow:
            return "gemm narrow";
        default:
            return "gemm few";
    }
}

const char* name_of(ExpertsProduct product) {
    switch (product) {
        case ExpertsProduct::tour:
            return "experts tour";
        case ExpertsProduct::middle:
            return "experts middle";
        default:
            return "experts many";
    }
}

const char* name_of(AttentionProduct product) {
    switch (product) {
        case AttentionProduct::split:
            return "split";
        case AttentionProduct::warpgroups:
            return "warpgroups";
        case AttentionProduct::tiles:
            return "tiles";
        default:
            return "generic";
    }
}

const char* name_of(GridProduct product) {
    return product == GridProduct::warpgroups ? "warpgroups" : "tiles";
}

const char* name_of(ScanProduct product) {
    return product == ScanProduct::warpgroups ? "warpgroups" : "tiles";
}

}  // namespace quern::cuda
