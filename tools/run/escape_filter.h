// EscapeFilter: model output made harmless for a terminal.
//
// A model can be made to print sequences that set the clipboard (OSC 52), the title or colours, or move the cursor.
// Removes C0 controls except \n and \t, DEL, C1 controls (U+0080..U+009F) and whole escape sequences (ECMA-48
// sections 5.3-5.6). Other text is kept byte for byte.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace quern {

class EscapeFilter {
  public:
    /// `text`: UTF-8, cut anywhere. The joined results do not depend on the cuts; at most one byte is held back.
    std::string push(std::string_view text);
    /// At the end: drops what was held back.
    void reset();

  private:
    enum class State { text, c2, escape, csi, string, string_escape, string_c2 };

    void step(unsigned char byte, std::string& out);
    void in_text(unsigned char byte, std::string& out);
    void after_c2(unsigned char byte, std::string& out);
    void in_escape(unsigned char byte, std::string& out);
    void in_csi(unsigned char byte, std::string& out);
    void in_string(unsigned char byte, std::string& out);
    void control(unsigned char c1);

    State state_ = State::text;
    size_t swallowed_ = 0;
};

}  // namespace quern
