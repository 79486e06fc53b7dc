// PastedTexts: long pastes stand in the line as "[pasted 200 lines]" while it is edited.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quern {

class PastedTexts {
  public:
    /// The text itself if it is short; else what stands for it, different for each text.
    std::string fold(const std::string& text);
    /// The line with each text in its place. A label that was edited is ordinary text.
    std::string unfold(std::string line) const;
    /// Bytes of the label that `text` ends with; 0: none.
    size_t label_at_end(std::string_view text) const;
    void clear() { texts_.clear(); }

  private:
    std::vector<std::pair<std::string, std::string>> texts_;  // label, text
};

}  // namespace quern
