// How byte-level BPE writes bytes in the texts of its tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "models/utf8.h"

namespace quern {

/// Each byte is one printable character: printable Latin-1 as itself, the 68 others in order from U+0100 on
/// (GPT-2).
class ByteAlphabet {
  public:
    ByteAlphabet() {
        bytes_.fill(-1);
        uint32_t next = 0x100;
        for (int byte = 0; byte < 256; ++byte) {
            const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
            const uint32_t code_point = printable ? static_cast<uint32_t>(byte) : next++;
            bytes_[code_point] = static_cast<int16_t>(byte);
            append_utf8(letters_[byte], code_point);
        }
    }
    /// How the vocabulary writes this byte.
    const std::string& letter(int byte) const { return letters_[byte]; }
    /// The bytes that `text`, valid UTF-8, stands for; false if it has a character that is not in the alphabet.
    bool read(std::string_view text, std::string& bytes) const {
        bytes.clear();
        for (size_t at = 0; at < text.size();) {
            const auto lead = static_cast<unsigned char>(text[at++]);
            size_t code_point = lead;
            // Letters have one byte or two; longer characters give a code point beyond the table.
            if (lead >= 0x80) {
                code_point = (lead & 0x3fu) << 6 | (static_cast<unsigned char>(text[at++]) & 0x3fu);
            }
            if (code_point >= bytes_.size() || bytes_[code_point] < 0) return false;
            bytes.push_back(static_cast<char>(bytes_[code_point]));
        }
        return true;
    }

  private:
    std::array<int16_t, 0x100 + 68> bytes_{};
    std::array<std::string, 256> letters_{};
};

}  // namespace quern
