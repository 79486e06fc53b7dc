#include "tools/bench/gpu_state.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "ggml-like/check.h"
#include "tools/common/nvml.h"

namespace quern {
namespace {

/// What a command prints; empty if it fails.
std::string output_of(const std::string& command) {
    std::FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
    if (pipe == nullptr) return {};
    std::string text;
    std::array<char, 512> buffer;
    while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) text.append(buffer.data(), n);
    return ::pclose(pipe) == 0 ? text : std::string();
}

std::string query(const std::string& bus_id, const char* what) {
    return output_of(fmt::format("nvidia-smi --id={} {} --format=csv,noheader", bus_id, what));
}

}  // namespace

std::string taint_of(const std::string& reasons, const std::string& processes) {
    const size_t hex = reasons.find("0x");
    if (hex == std::string::npos) return "unknown";
    const uint64_t mask = std::strtoull(reasons.c_str() + hex, nullptr, 16);
    std::string text = clock_reasons(mask);
    std::istringstream lines(processes);
    int64_t count = 0;
    for (std::string line; std::getline(lines, line);) count += !line.empty();
    if (count > 1)
        text += fmt::format("{}{} processes", text.empty() ? "" : ", ",
                            count);  // one is this one; containers may hide it
    return text;
}

std::string gpu_taint(const std::string& bus_id) {
    const bool plain = std::all_of(bus_id.begin(), bus_id.end(),
                                   [](char c) { return std::isxdigit(c) || c == ':' || c == '.'; });
    if (bus_id.empty() || !plain) return "unknown";
    std::string reasons = query(bus_id, "--query-gpu=clocks_event_reasons.active");
    if (reasons.empty())
        reasons = query(bus_id, "--query-gpu=clocks_throttle_reasons.active");  // drivers before 535
    return taint_of(reasons, query(bus_id, "--query-compute-apps=pid"));
}

}  // namespace quern
