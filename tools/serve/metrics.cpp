#include "tools/serve/metrics.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "tools/engine/draft_rows.h"

namespace quern {
namespace {

void add(std::string& out, const char* type, const std::string& name, const char* help, int64_t value) {
    out +=
        fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} {2}\nquern_{0} {3}\n", name, help, type, value);
}

std::string replica_label(size_t replica) { return fmt::format("replica=\"{}\"", replica); }

/// In braces, if there are any.
std::string in_braces(const std::string& labels) {
    return labels.empty() ? std::string() : fmt::format("{{{}}}", labels);
}

/// What every replica says, each under its label; a single one has none.
class OfReplicas {
  public:
    OfReplicas(std::string& out, const Metrics& metrics) : out_(out), metrics_(metrics) {}

    void head(const char* type, const char* name, const char* help) {
        out_ += fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} {2}\n", name, help, type);
    }
    template <typename Value>  // of a ReplicaMetrics
    void add(const char* type, const char* name, const char* help, const Value& value) {
        head(type, name, help);
        each([&](const ReplicaMetrics& m, const std::string& labels) {
            out_ += fmt::format("quern_{}{} {}\n", name, in_braces(labels), value(m));
        });
    }
    void each(const std::function<void(const ReplicaMetrics&, const std::string& labels)>& say) const {
        const bool several = metrics_.replicas() > 1;
        for (size_t r = 0; r < metrics_.replicas(); ++r)
            say(metrics_.replica(r), several ? replica_label(r) : "");
    }

  private:
    std::string& out_;
    const Metrics& metrics_;
};

std::string cost_labels(const SpeculationReport::Cost& c) {
    const std::string size = fmt::format("sequences=\"{}\",rows=\"{}\"", c.sequences, c.rows);
    return c.draft_rows == DraftRows::frequent
               ? size
               : fmt::format("{},draft_rows=\"{}\"", size, draft_rows_name(c.draft_rows));
}

using Reports = std::vector<std::pair<std::string, SpeculationReport>>;  // by label

void add_speculation(std::string& out, const Reports& reports) {
    const auto each = [&](const char* type, const char* name, const char* help, const auto& say) {
        out += fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} {2}\n", name, help, type);
        for (const auto& report : reports) {
            const std::string& label = report.first;
            const auto line = [&](const std::string& more, auto value) {
                const std::string both = label.empty() || more.empty() ? label + more : label + "," + more;
                out += fmt::format("quern_{}{} {}\n", name, in_braces(both), value);
            };
            say(report.second, line);
        }
    };
    using Report = SpeculationReport;
    each("counter", "draft_steps_total", "answer steps that might have had drafts",
         [](const Report& r, const auto& line) { line("", r.steps); });
    each("counter", "draft_rounds_total", "of these, steps that had",
         [](const Report& r, const auto& line) { line("", r.rounds); });
    each("gauge", "draft_last_tokens", "tokens drafted for the last of these steps; 0: none would have paid",
         [](const Report& r, const auto& line) { line("", r.last_drafted); });
    each("gauge", "draft_expected_gain", "speed-up that was expected of them; 0: not known yet",
         [](const Report& r, const auto& line) { line("", static_cast<double>(r.gain())); });
    each("gauge", "draft_acceptance", "share of drafts that are right up to a position, lately",
         [](const Report& r, const auto& line) {
             for (size_t i = 0; i < r.acceptance.size(); ++i)
                 line(fmt::format("position=\"{}\"", i + 1), static_cast<double>(r.acceptance[i]));
         });
    each("counter", "draft_passes_total",
         "passes that chose drafts from a head, by the rows of it that they read",
         [](const Report& r, const auto& line) {
             for (size_t i = 0; i < r.passes.size(); ++i)
                 line(fmt::format("rows=\"{}\"", draft_rows_name(static_cast<DraftRows>(i))), r.passes[i]);
         });
    each("gauge", "draft_step_cost_seconds",
         "time of an answer step, drafting included; draft_rows: of the head that drafts read, where not the "
         "fewest",
         [](const Report& r, const auto& line) {
             for (const Report::Cost& c : r.costs) line(cost_labels(c), static_cast<double>(c.seconds));
         });
}

}  // namespace

void Histogram::add(double seconds) {
    size_t i = 0;
    while (i < kBounds.size() && seconds > kBounds[i]) ++i;
    ++counts_[i];
    microseconds_ += static_cast<int64_t>(seconds * 1e6);
}

std::string Histogram::lines(const std::string& name, const std::string& labels) const {
    const std::string before = labels.empty() ? "" : labels + ",";
    std::string out;
    int64_t total = 0;
    for (size_t i = 0; i <= kBounds.size(); ++i) {
        total += counts_[i];
        const std::string bound = i < kBounds.size() ? fmt::format("{}", kBounds[i]) : "+Inf";
        out += fmt::format("quern_{}_bucket{{{}le=\"{}\"}} {}\n", name, before, bound, total);
    }
    return out + fmt::format("quern_{0}_sum{3} {1}\nquern_{0}_count{3} {2}\n", name,
                             static_cast<double>(microseconds_) / 1e6, total, in_braces(labels));
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
    return fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} histogram\n", name, help) + lines(name, "");
}

void ReplicaMetrics::set_cache(const PrefixCacheStats& stats) {
    const std::lock_guard lock(mutex_);
    cache_ = stats;
}

PrefixCacheStats ReplicaMetrics::cache() const {
    const std::lock_guard lock(mutex_);
    return cache_;
}

void ReplicaMetrics::set_speculation(std::optional<SpeculationReport> report) {
    const std::lock_guard lock(mutex_);
    speculation_ = std::move(report);
}

std::optional<SpeculationReport> ReplicaMetrics::speculation() const {
    const std::lock_guard lock(mutex_);
    return speculation_;
}

void ReplicaMetrics::set_kept(KeptReport report) {
    const std::lock_guard lock(mutex_);
    kept_ = std::move(report);
}

KeptReport ReplicaMetrics::kept() const {
    const std::lock_guard lock(mutex_);
    return kept_;
}

Metrics::Metrics(size_t replicas) {
    for (size_t r = 0; r < replicas; ++r) replicas_.push_back(std::make_unique<ReplicaMetrics>());
}

int64_t Metrics::running() const {
    int64_t sum = 0;
    for (const auto& m : replicas_) sum += m->running;
    return sum;
}

int64_t Metrics::queued() const {
    int64_t sum = waiting;
    for (const auto& m : replicas_) sum += m->queued;
    return sum;
}

const ReplicaMetrics& Metrics::newest() const {
    const auto older = [](const auto& a, const auto& b) { return a->cache().changes < b->cache().changes; };
    return **std::max_element(replicas_.begin(), replicas_.end(), older);
}

std::string Metrics::text() const {
    const PrefixCacheStats c = newest().cache();
    std::string out;
    OfReplicas of(out, *this);
    const auto counter = [&](const char* name, const char* help,
                             std::atomic<int64_t> ReplicaMetrics::*value) {
        of.add("counter", name, help, [&](const ReplicaMetrics& m) { return (m.*value).load(); });
    };
    const auto cache = [&](const char* type, const char* name, const char* help,
                           int64_t PrefixCacheStats::*value) {
        of.add(type, name, help, [&](const ReplicaMetrics& m) { return m.cache().*value; });
    };
    if (replicas() > 1)
        of.add("gauge", "replica_up", "1: the replica runs; 0: its device has failed",
               [](const ReplicaMetrics& m) { return m.up ? 1 : 0; });
    add(out, "counter", "requests_total", "requests that were accepted", requests);
    add(out, "counter", "requests_failed_total", "requests that ended with an error", failed);
    add(out, "counter", "requests_refused_total", "requests refused because the queue was full", refused);
    add(out, "counter", "requests_slow_total", "answers ended because their client did not read", slow);
    add(out, "gauge", "requests_queued", "answers waiting for a slot", queued());
    of.add("gauge", "requests_running", "answers being computed",
           [](const ReplicaMetrics& m) { return m.running.load(); });
    counter("prompt_tokens_computed_total", "prompt tokens that were computed",
            &ReplicaMetrics::computed_tokens);
    counter("prompt_tokens_cached_total", "prompt tokens whose state was kept",
            &ReplicaMetrics::cached_tokens);
    counter("answer_tokens_total", "tokens generated", &ReplicaMetrics::answer_tokens);
    counter("draft_tokens_total", "tokens drafted for answers that have ended",
            &ReplicaMetrics::drafted_tokens);
    counter("draft_tokens_accepted_total", "of these, tokens that the model chose too",
            &ReplicaMetrics::accepted_tokens);
    Reports reports;
    of.each([&](const ReplicaMetrics& m, const std::string& label) {
        if (auto report = m.speculation()) reports.emplace_back(label, std::move(*report));
    });
    if (!reports.empty()) add_speculation(out, reports);
    out +=
        "# HELP quern_cancelled_total answers given up because the client had gone\n"
        "# TYPE quern_cancelled_total counter\n";
    for (size_t i = 0; i < cancelled.size(); ++i)
        out += fmt::format("quern_cancelled_total{{phase=\"{}\"}} {}\n",
                           std::array{"queued", "prefill", "decode"}[i], cancelled[i].load());
    add(out, "gauge", "cache_snapshots", "states kept", c.snapshots);
    cache("gauge", "cache_device_snapshots", "of these, also in the device's memory",
          &PrefixCacheStats::near);
    add(out, "gauge", "cache_bytes", "bytes of host memory that states take", c.bytes);
    add(out, "gauge", "cache_budget_bytes", "bytes that states may take", c.budget);
    cache("counter", "cache_hits_total", "prompts that began with a kept state", &PrefixCacheStats::hits);
    cache("counter", "cache_misses_total", "prompts that did not", &PrefixCacheStats::misses);
    cache("counter", "cache_loaded_total", "hits whose state came back from host memory",
          &PrefixCacheStats::loaded);
    add(out, "counter", "cache_stored_total", "states kept so far", c.stored);
    add(out, "counter", "cache_evicted_total", "states given up", c.evicted);
    add(out, "counter", "cache_refused_total", "states not kept, since those there were worth more",
        c.refused);
    of.head("histogram", "step_seconds", "time of one engine step");
    of.each([&](const ReplicaMetrics& m, const std::string& label) {
        out += m.step.lines("step_seconds", label);
    });
    out += first_token.text("first_token_seconds", "from the request to its first token");
    out += whole.text("request_seconds", "from the request to the end of its answer");
    return out;
}

}  // namespace quern
