// Images inside of requests: data: URLs and base64.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace quern {

/// `text` in base64 (RFC 4648, the standard alphabet; white space is skipped, the padding may be absent). Throws Error(usage) for
/// anything else, and for more than `most` bytes.
std::vector<uint8_t> decode_base64(std::string_view text, size_t most);

/// The bytes of "data:image/png;base64,...", whatever its media type says. Throws Error(usage) as decode_base64 and, naming the
/// scheme, for URLs of other schemes: nothing is ever fetched.
std::vector<uint8_t> decode_data_url(std::string_view url, size_t most);

}  // namespace quern
