#include "tools/engine/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace quern {
namespace {

/// The number after a word in a file of words and numbers.
std::optional<int64_t> number_after(const char* path, const std::string& word) {
    std::ifstream file(path);
    std::string found, rest;
    for (int64_t number = 0; file >> found >> number; std::getline(file, rest))
        if (found == word) return number;
    return std::nullopt;
}

std::optional<int64_t> number_in(const char* path) {
    std::ifstream file(path);
    int64_t number = 0;
    return file >> number ? std::optional(number) : std::nullopt;
}

}  // namespace

int64_t host_memory_left() {
    int64_t left = std::numeric_limits<int64_t>::max();
    if (const auto available = number_after("/proc/meminfo", "MemAvailable:")) left = *available * 1024;
    const auto limit = number_in("/sys/fs/cgroup/memory.max"),
               taken = number_in("/sys/fs/cgroup/memory.current");
    if (!limit || !taken) return left;
    const char* parts = "/sys/fs/cgroup/memory.stat";
    const int64_t cached =  // files, which can be dropped
        number_after(parts, "file").value_or(0) - number_after(parts, "shmem").value_or(0);
    return std::min(left, std::max<int64_t>(0, *limit - *taken + cached));
}

}  // namespace quern
