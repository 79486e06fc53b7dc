// Metrics: counters and histograms of the server in Prometheus' text format. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tools/engine/prefix_cache_stats.h"
#include "tools/engine/speculation_report.h"

namespace quern {

/// Counts durations up to each bound.
class Histogram {
  public:
    void add(double seconds);
    /// The lines of the metric `name`, with these labels beside its own: `replica="0"`, or none.
    std::string lines(const std::string& name, const std::string& labels) const;
    /// The same, after what the metric is.
    std::string text(const std::string& name, const std::string& help) const;

  private:
    static constexpr std::array<double, 12> kBounds = {0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
                                                       0.2,   0.5,   1,    2,    5,    10};
    std::array<std::atomic<int64_t>, kBounds.size() + 1> counts_{};
    std::atomic<int64_t> microseconds_ = 0;
};

enum class Phase { queued, prefill, decode };

/// What one replica's thread counts.
struct ReplicaMetrics {
    std::atomic<bool> up = true;
    std::atomic<int64_t> queued = 0, running = 0;
    std::atomic<int64_t> computed_tokens = 0, cached_tokens = 0, answer_tokens = 0;
    std::atomic<int64_t> drafted_tokens = 0, accepted_tokens = 0;
    Histogram step;

    void set_cache(const PrefixCacheStats& stats);
    PrefixCacheStats cache() const;
    void set_speculation(std::optional<SpeculationReport> report);
    std::optional<SpeculationReport> speculation() const;
    void set_kept(KeptReport report);
    KeptReport kept() const;

  private:
    mutable std::mutex mutex_;
    PrefixCacheStats cache_;
    std::optional<SpeculationReport> speculation_;
    KeptReport kept_;
};

class Metrics {
  public:
    explicit Metrics(size_t replicas = 1);

    std::atomic<int64_t> requests = 0, failed = 0, refused = 0, slow = 0;
    std::atomic<int64_t> waiting = 0;                 // answers that no replica has
    std::array<std::atomic<int64_t>, 3> cancelled{};  // by Phase
    Histogram first_token, whole;

    size_t replicas() const { return replicas_.size(); }
    ReplicaMetrics& replica(size_t number) { return *replicas_[number]; }
    const ReplicaMetrics& replica(size_t number) const { return *replicas_[number]; }
    int64_t running() const;
    int64_t queued() const;
    /// The newest of what replicas have told of the memory that they share.
    const ReplicaMetrics& newest() const;
    /// With several replicas, what each counts has a label: replica="0".
    std::string text() const;

  private:
    std::vector<std::unique_ptr<ReplicaMetrics>> replicas_;
};

}  // namespace quern
