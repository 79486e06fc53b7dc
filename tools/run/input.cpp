#include "tools/run/input.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

std::string read_all(int fd, const std::string& what, int64_t limit) {
    std::string out;
    char chunk[1 << 16];
    while (true) {
        const ssize_t n = ::read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EBADF) return out;
        if (n < 0) FAIL(usage, "cannot read {}: {}", what, std::strerror(errno));
        if (n == 0) return out;
        out.append(chunk, static_cast<size_t>(n));
        if (static_cast<int64_t>(out.size()) > limit)
            FAIL(usage, "{} is longer than {} MiB, the most that is read", what, limit >> 20);
    }
}

std::string checked(std::string text, const std::string& what) {
    if (text.rfind("\xEF\xBB\xBF", 0) == 0) text.erase(0, 3);
    size_t offset = 0;
    if (!is_utf8(text, &offset))
        FAIL(usage, "{} is not UTF-8 text: bad byte 0x{:02X} at offset {}", what,
             static_cast<unsigned char>(text[offset]), offset);
    return text;
}

}  // namespace

std::string read_input_file(const std::string& path, int64_t limit) {
    const std::string what = "'" + printable(path, 300) + "'";
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) FAIL(usage, "cannot open {}: {}", what, std::strerror(errno));
    std::string text;
    try {
        text = read_all(fd, what, limit);
    } catch (...) {
        ::close(fd);
        throw;
    }
    ::close(fd);
    return checked(std::move(text), what);
}

std::string read_standard_input(int64_t limit) {
    return checked(read_all(STDIN_FILENO, "standard input", limit), "standard input");
}

std::string join_prompt(const std::string& prompt, const std::string& text) {
    if (prompt.empty() || text.empty()) return prompt + text;
    return prompt + (prompt.back() == '\n' ? "\n" : "\n\n") + text;
}

}  // namespace quern
