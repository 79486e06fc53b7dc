// The bytes of all tokens of a vocabulary, one after another.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

class TokenPieces {
  public:
    void reserve(size_t tokens, size_t bytes) {
        ends_.reserve(tokens);
        bytes_.reserve(bytes);
    }
    /// The bytes of the next id.
    void add(std::string_view piece) {
        bytes_.append(piece);
        ends_.push_back(bytes_.size());
    }
    size_t size() const { return ends_.size(); }
    /// `id` below size().
    std::string_view operator[](size_t id) const {
        const size_t begin = id > 0 ? ends_[id - 1] : 0;
        return std::string_view(bytes_).substr(begin, ends_[id] - begin);
    }

  private:
    std::string bytes_;
    std::vector<size_t> ends_;  // of each piece in bytes_
};

}  // namespace quern
