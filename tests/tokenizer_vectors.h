// The committed tokenizer: its files and what they load as.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "models/tokenizer.h"

namespace quern::test {

using Ids = std::vector<int32_t>;

inline const std::string kTokenizerVectors = QUERN_SOURCE_DIR "/tests/vectors/tokenizer";

inline std::string read_text(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

inline const Tokenizer& tokenizer() {
    static const Tokenizer instance = Tokenizer::load(kTokenizerVectors, 0);
    return instance;
}

}  // namespace quern::test
