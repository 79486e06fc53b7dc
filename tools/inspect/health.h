// The health of a checkpoint's quantization: what its bytes show, judged matrix by matrix.
//
// Seen: damaged or inverted scales, erased blocks, codes that do not fit their scales or are permuted, unused
// range, dead and duplicate experts. Not seen in one file: gate and up exchanged, scales shifted by whole blocks,
// columns permuted within a block; only the original (--against) or the answers (bench --doctor) show those.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/common/inspection.h"
#include "tools/inspect/segment_stats.h"

namespace quern {

enum class Grade : uint8_t { a, b, c, d, f };  // f: quern refuses it, or should not run it
char letter(Grade grade);

struct Finding {
    Grade grade;
    std::string text;
};

/// Columns of the heat map.
enum class Role : uint8_t { in, out, router, expert_gate_up, expert_down, shared, mlp, ends };
inline constexpr int kRoles = 8;
const char* role_name(Role role);

struct MatrixHealth {
    const WeightSegment* segment = nullptr;
    int64_t layer = -1;  // -1: embedding and head
    Role role = Role::ends;
    bool expert = false;
    SegmentStats stats;
    float global_scale = 1;  // multiplier form; 0 if it cannot be read
    std::vector<Finding> findings;

    Grade grade() const;
    /// The largest weight that its scales allow.
    float amax() const;
};

struct HealthReport {
    std::vector<MatrixHealth> matrices;  // in the order of the model; layer by layer
    int64_t layers = 0;
    int64_t dead = 0, duplicates = 0;  // expert matrices
    int64_t bytes = 0;
    double seconds = 0;

    Grade grade(int64_t layer) const;  // -1: embedding and head
    /// The worst grade of that role; false if the layer has no such matrix.
    bool cell(int64_t layer, Role role, Grade& grade) const;
    bool clean() const;  // nothing of grade f
    /// Indices of matrices with findings, worst first, `count` at most.
    std::vector<size_t> worst(size_t count) const;
};

/// Reads every weight on `threads` threads, with a progress bar on stderr. The text model of `in` must be readable.
HealthReport measure_health(const Inspection& in, int threads);

std::string describe(const HealthReport& report);
nlohmann::ordered_json to_json(const HealthReport& report);
/// One self-contained page.
std::string to_html(const HealthReport& report, const std::string& title);

}  // namespace quern
