#include "models/draft_head.h"

#include <algorithm>

#include "ggml-like/requantize.h"
#include "models/tokenizer.h"
#include "models/weight_format.h"

namespace quern {
namespace {

constexpr int64_t kMostAdded = 4096;  // more added tokens are a part of the vocabulary
constexpr int64_t kGuessed = 256;     // added tokens where no tokenizer says which there are

struct Range {
    int64_t begin, end;
    int64_t rows() const { return end - begin; }
};

/// Ranges of rows begin and end at multiples of that: blocks of scales, tiles of a GPU.
int64_t granule(const WeightSegment& head) { return head.scale_kind == ScaleKind::block128 ? 128 : 16; }

Range of_added_tokens(int64_t rows, int64_t each, const Tokenizer* tokenizer) {
    Range r{rows - std::min(kGuessed, rows / 8), rows};
    if (tokenizer != nullptr) {
        r = {rows, rows};
        for (int64_t id = rows; id-- > 0;)
            if (tokenizer->is_added(static_cast<int32_t>(id))) r.begin = id;
        if (r.begin == rows) return r;
        while (r.end > r.begin && !tokenizer->is_added(static_cast<int32_t>(r.end - 1))) --r.end;
    }
    r = {r.begin / each * each, std::min(rows, (r.end + each - 1) / each * each)};
    return r.rows() <= kMostAdded ? r : Range{rows, rows};
}

}  // namespace

std::optional<DraftHead> plan_draft_head(const Weight& head, int64_t bytes, int64_t vocab,
                                         const Tokenizer* tokenizer, int64_t frequent) {
    if (bytes <= 0 || head.segments.size() != 1 || head.bytes() <= bytes) return std::nullopt;
    const WeightSegment& stored = head.segments[0];
    const int64_t rows = head.rows, each = granule(stored);
    const DenseFormat format =
        can_requantize(head, DenseFormat::nvfp4) ? DenseFormat::nvfp4 : DenseFormat::fp8;
    const Range added = of_added_tokens(rows, each, tokenizer);
    const auto form = [&](int64_t first) {
        std::vector<WeightSegment> parts;
        if (added.rows() > 0) parts.push_back(slice_rows(stored, added.begin, added.rows(), stored.name));
        parts.push_back(slice_rows(stored, 0, first, stored.name));
        return Weight("draft_head", std::move(parts));
    };
    const int64_t row_bytes = requantized_form(head, format).bytes() / rows;
    int64_t copied = std::min(added.begin, (bytes / row_bytes - added.rows()) / each * each);
    while (copied > 0 && requantized_form(form(copied), format).bytes() > bytes) copied -= each;
    if (copied < added.rows() || copied <= 0) return std::nullopt;
    DraftHead out{.from = form(copied),
                  .columns = {.first = added.rows(), .start = added.begin, .vocab = vocab},
                  .tokens = {.frequent = copied, .copied = copied, .added = added.begin}};
    out.weight = requantized_form(out.from, format);
    frequent = frequent / each * each;
    const bool whole_tiles = (added.rows() + frequent) % 16 == 0;  // Backend::share_first_rows
    if (frequent > 0 && whole_tiles && copied >= frequent + frequent / 4) {
        out.tokens.frequent = frequent;
        out.frequent = first_rows(out.weight, added.rows() + frequent);
    }
    return out;
}

}  // namespace quern
