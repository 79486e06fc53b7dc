// Requests of tests of kept states: drawn with a seed, and prompts that go on from others.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tools/engine/request.h"

namespace quern::test {

inline Request request(std::vector<int32_t> prompt, int64_t tokens = 6) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0.8f;
    r.sampling.seed = 5;
    r.max_tokens = tokens;
    return r;
}

inline std::vector<int32_t> longer(std::vector<int32_t> ids, size_t by) {
    for (size_t i = 0; i < by; ++i) ids.push_back(static_cast<int32_t>(1 + i % 7));
    return ids;
}

}  // namespace quern::test
