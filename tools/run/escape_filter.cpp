#include "tools/run/escape_filter.h"

namespace quern {
namespace {

constexpr unsigned char kEsc = 0x1B;
constexpr unsigned char kBel = 0x07;
// A sequence that does not end must not hide the rest of the answer.
constexpr size_t kLongestSequence = 256;

}  // namespace

std::string EscapeFilter::push(std::string_view text) {
    std::string out;
    out.reserve(text.size() + 1);
    for (char c : text) step(static_cast<unsigned char>(c), out);
    return out;
}

void EscapeFilter::reset() {
    state_ = State::text;
    swallowed_ = 0;
}

void EscapeFilter::step(unsigned char byte, std::string& out) {
    switch (state_) {
        case State::text:
            return in_text(byte, out);
        case State::c2:
            return after_c2(byte, out);
        case State::escape:
            return in_escape(byte, out);
        case State::csi:
            return in_csi(byte, out);
        case State::string:
            return in_string(byte, out);
        case State::string_escape:
            state_ = State::text;
            if (byte == '\\') return;  // ST
            return in_escape(byte, out);
        case State::string_c2:
            state_ = State::string;
            if (byte == 0x9C) {  // ST as one C1 control
                state_ = State::text;
                return;
            }
            return in_string(byte, out);
    }
}

void EscapeFilter::in_text(unsigned char byte, std::string& out) {
    if (byte == kEsc) {
        state_ = State::escape;
        swallowed_ = 0;
    } else if (byte == 0xC2) {
        state_ = State::c2;
    } else if (byte == '\n' || byte == '\t' || (byte >= 0x20 && byte != 0x7F)) {
        out += static_cast<char>(byte);
    }
}

void EscapeFilter::after_c2(unsigned char byte, std::string& out) {
    state_ = State::text;
    if (byte >= 0x80 && byte <= 0x9F) return control(byte);
    // Not UTF-8: left in, it could join with what follows a removed sequence.
    if (byte >= 0xA0 && byte <= 0xBF) out += '\xC2';
    in_text(byte, out);
}

void EscapeFilter::control(unsigned char c1) {
    swallowed_ = 0;
    if (c1 == 0x9B) state_ = State::csi;
    const bool opens_string = c1 == 0x90 || c1 == 0x98 || c1 >= 0x9D;  // DCS, SOS, OSC, PM, APC
    if (opens_string) state_ = State::string;
}

void EscapeFilter::in_escape(unsigned char byte, std::string& out) {
    state_ = State::text;
    if (byte >= 0x40 && byte <= 0x5F) return control(static_cast<unsigned char>(byte + 0x40));
    if (byte >= 0x20 && byte <= 0x2F && ++swallowed_ < kLongestSequence) {
        state_ = State::escape;  // intermediate bytes: ESC ( B
        return;
    }
    if (byte >= 0x30 && byte <= 0x7E) return;  // the final byte
    in_text(byte, out);
}

void EscapeFilter::in_csi(unsigned char byte, std::string& out) {
    if (byte >= 0x20 && byte <= 0x3F && ++swallowed_ < kLongestSequence) return;
    state_ = State::text;
    if (byte >= 0x40 && byte <= 0x7E) return;  // the final byte
    in_text(byte, out);
}

void EscapeFilter::in_string(unsigned char byte, std::string& out) {
    if (byte == kBel) {
        state_ = State::text;
    } else if (byte == kEsc) {
        state_ = State::string_escape;
        swallowed_ = 0;
    } else if (byte == 0xC2) {
        state_ = State::string_c2;
        ++swallowed_;
    } else if (byte == '\n' || ++swallowed_ >= kLongestSequence) {
        state_ = State::text;
        in_text(byte, out);
    }
}

}  // namespace quern
