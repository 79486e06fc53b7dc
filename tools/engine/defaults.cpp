#include "tools/engine/defaults.h"

#include <random>

#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/engine/sampling_ranges.h"

namespace quern {

Sampling default_sampling(const Model& model) {
    const GenerationDefaults& given = model.generation();
    Sampling out;
    out.temperature = given.greedy ? 0.0f : given.temperature.value_or(out.temperature);
    out.top_k = given.top_k.value_or(out.top_k);
    out.top_p = given.top_p.value_or(out.top_p);
    out.min_p = given.min_p.value_or(out.min_p);
    out.repetition_penalty = given.repetition_penalty.value_or(out.repetition_penalty);
    for (const SamplingField& f : sampling_fields())
        if (const double value = f.get(out); !f.range.holds(value))
            FAIL(model, "{}: {}", given.origin, f.range.message(f.name, fmt::format("{}", value)));
    return out;
}

uint64_t random_seed() { return std::random_device{}() & 0x7FFFFFFFu; }

uint64_t seed_of(int64_t given) {
    return given == kRandomSeed ? random_seed() : static_cast<uint64_t>(given);
}

}  // namespace quern
