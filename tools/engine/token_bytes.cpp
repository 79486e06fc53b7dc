#include "tools/engine/token_bytes.h"

#include <algorithm>

namespace quern {
namespace {

void add(TokenBytes& bytes, const char* name, double value) {
    const auto part =
        std::find_if(bytes.begin(), bytes.end(), [&](const auto& p) { return p.first == name; });
    if (part == bytes.end())
        bytes.emplace_back(name, value);
    else
        part->second += value;
}

/// `counted`: bytes of a use, which a step reads at most once.
template <typename F>
TokenBytes weight_bytes(const Model& model, int64_t sequences, F&& counted) {
    TokenBytes bytes;
    for (const WeightUse& use : model.weights().uses)
        add(bytes, use.group,
            use.share(sequences) * static_cast<double>(counted(use)) / static_cast<double>(sequences));
    return bytes;
}

int64_t unquantized(const Weight& weight) {
    int64_t bytes = 0;
    for (const WeightSegment& s : weight.segments)
        if (s.scale_kind == ScaleKind::none) bytes += s.bytes();
    return bytes;
}

}  // namespace

TokenBytes token_bytes(const Model& model, const MemoryPlan& plan, int64_t sequences, double depth) {
    TokenBytes bytes = weight_bytes(model, sequences, [](const WeightUse& use) { return use.bytes(); });
    add(bytes, "KV cache", depth * static_cast<double>(plan.token_bytes));
    add(bytes, "recurrent state", 2.0 * static_cast<double>(recurrent_bytes(plan.specs)));
    return bytes;
}

TokenBytes unquantized_token_bytes(const Model& model, int64_t sequences) {
    return weight_bytes(model, sequences, [](const WeightUse& use) {
        if (use.matrix != nullptr) return unquantized(*use.matrix);
        int64_t bytes = 0;
        if (use.experts != nullptr)
            for (const Weight& w : use.experts->expert) bytes += unquantized(w);
        return bytes;
    });
}

double total(const TokenBytes& bytes) {
    double sum = 0;
    for (const auto& [name, value] : bytes) sum += value;
    return sum;
}

}  // namespace quern
