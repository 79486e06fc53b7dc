#include "tools/serve/metrics.h"

#include <fmt/format.h>

namespace quern {
namespace {

void add(std::string& out, const char* type, const std::string& name, const char* help, int64_t value) {
    out +=
        fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} {2}\nquern_{0} {3}\n", name, help, type, value);
}

/// A gauge with a value for each label.
class Gauges {
  public:
    Gauges(std::string& out, const char* name, const char* help) : out_(out), name_(name) {
        out_ += fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} gauge\n", name, help);
    }
    void add(const std::string& labels, double value) {
        out_ += fmt::format("quern_{}{} {}\n", name_, labels, value);
    }

  private:
    std::string& out_;
    const char* name_;
};

void add_speculation(std::string& out, const SpeculationReport& r) {
    add(out, "counter", "draft_steps_total", "answer steps that might have had drafts", r.steps);
    add(out, "counter", "draft_rounds_total", "of these, steps that had", r.rounds);
    add(out, "gauge", "draft_last_tokens",
        "tokens drafted for the last of these steps; 0: none would have paid", r.last_drafted);
    Gauges(out, "draft_expected_gain", "speed-up that was expected of them; 0: not known yet")
        .add("", r.gain());
    Gauges acceptance(out, "draft_acceptance", "share of drafts that are right up to a position, lately");
    for (size_t i = 0; i < r.acceptance.size(); ++i)
        acceptance.add(fmt::format("{{position=\"{}\"}}", i + 1), r.acceptance[i]);
    Gauges costs(out, "draft_step_cost_seconds", "time of an answer step, drafting included");
    for (const SpeculationReport::Cost& c : r.costs)
        costs.add(fmt::format("{{sequences=\"{}\",rows=\"{}\"}}", c.sequences, c.rows), c.seconds);
}

}  // namespace

void Histogram::add(double seconds) {
    size_t i = 0;
    while (i < kBounds.size() && seconds > kBounds[i]) ++i;
    ++counts_[i];
    microseconds_ += static_cast<int64_t>(seconds * 1e6);
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
    std::string out = fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} histogram\n", name, help);
    int64_t total = 0;
    for (size_t i = 0; i <= kBounds.size(); ++i) {
        total += counts_[i];
        const std::string bound = i < kBounds.size() ? fmt::format("{}", kBounds[i]) : "+Inf";
        out += fmt::format("quern_{}_bucket{{le=\"{}\"}} {}\n", name, bound, total);
    }
    return out + fmt::format("quern_{0}_sum {1}\nquern_{0}_count {2}\n", name,
                             static_cast<double>(microseconds_) / 1e6, total);
}

void Metrics::set_cache(const PrefixCacheStats& stats) {
    const std::lock_guard lock(mutex_);
    cache_ = stats;
}

PrefixCacheStats Metrics::cache() const {
    const std::lock_guard lock(mutex_);
    return cache_;
}

void Metrics::set_speculation(std::optional<SpeculationReport> report) {
    const std::lock_guard lock(mutex_);
    speculation_ = std::move(report);
}

std::optional<SpeculationReport> Metrics::speculation() const {
    const std::lock_guard lock(mutex_);
    return speculation_;
}

void Metrics::set_kept(KeptReport report) {
    const std::lock_guard lock(mutex_);
    kept_ = std::move(report);
}

KeptReport Metrics::kept() const {
    const std::lock_guard lock(mutex_);
    return kept_;
}

std::string Metrics::text() const {
    const PrefixCacheStats c = cache();
    std::string out;
    add(out, "counter", "requests_total", "requests that were accepted", requests);
    add(out, "counter", "requests_failed_total", "requests that ended with an error", failed);
    add(out, "counter", "requests_refused_total", "requests refused because the queue was full", refused);
    add(out, "counter", "requests_slow_total", "answers ended because their client did not read", slow);
    add(out, "gauge", "requests_queued", "answers waiting for a slot", queued);
    add(out, "gauge", "requests_running", "answers being computed", running);
    add(out, "counter", "prompt_tokens_computed_total", "prompt tokens that were computed", computed_tokens);
    add(out, "counter", "prompt_tokens_cached_total", "prompt tokens whose state was kept", cached_tokens);
    add(out, "counter", "answer_tokens_total", "tokens generated", answer_tokens);
    add(out, "counter", "draft_tokens_total", "tokens drafted for answers that have ended", drafted_tokens);
    add(out, "counter", "draft_tokens_accepted_total", "of these, tokens that the model chose too",
        accepted_tokens);
    if (const auto report = speculation()) add_speculation(out, *report);
    out +=
        "# HELP quern_cancelled_total answers given up because the client had gone\n"
        "# TYPE quern_cancelled_total counter\n";
    for (size_t i = 0; i < cancelled.size(); ++i)
        out += fmt::format("quern_cancelled_total{{phase=\"{}\"}} {}\n",
                           std::array{"queued", "prefill", "decode"}[i], cancelled[i].load());
    add(out, "gauge", "cache_snapshots", "states kept", c.snapshots);
    add(out, "gauge", "cache_device_snapshots", "of these, also in the device's memory", c.near);
    add(out, "gauge", "cache_bytes", "bytes of host memory that states take", c.bytes);
    add(out, "gauge", "cache_budget_bytes", "bytes that states may take", c.budget);
    add(out, "counter", "cache_hits_total", "prompts that began with a kept state", c.hits);
    add(out, "counter", "cache_misses_total", "prompts that did not", c.misses);
    add(out, "counter", "cache_loaded_total", "hits whose state came back from host memory", c.loaded);
    add(out, "counter", "cache_stored_total", "states kept so far", c.stored);
    add(out, "counter", "cache_evicted_total", "states given up", c.evicted);
    add(out, "counter", "cache_refused_total", "states not kept, since those there were worth more",
        c.refused);
    out += step.text("step_seconds", "time of one engine step");
    out += first_token.text("first_token_seconds", "from the request to its first token");
    out += whole.text("request_seconds", "from the request to the end of its answer");
    return out;
}

}  // namespace quern
