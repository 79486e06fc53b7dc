#include "tools/serve/metrics.h"

#include <fmt/format.h>

namespace quern {
namespace {

void add(std::string& out, const char* type, const std::string& name, const char* help, int64_t value) {
    out +=
        fmt::format("# HELP quern_{0} {1}\n# TYPE quern_{0} {2}\nquern_{0} {3}\n", name, help, type, value);
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
    out +=
        "# HELP quern_cancelled_total answers given up because the client had gone\n"
        "# TYPE quern_cancelled_total counter\n";
    for (size_t i = 0; i < cancelled.size(); ++i)
        out += fmt::format("quern_cancelled_total{{phase=\"{}\"}} {}\n",
                           std::array{"queued", "prefill", "decode"}[i], cancelled[i].load());
    add(out, "gauge", "cache_snapshots", "states kept", c.snapshots);
    add(out, "gauge", "cache_bytes", "bytes of states kept", c.bytes);
    add(out, "gauge", "cache_budget_bytes", "bytes that states may take", c.budget);
    add(out, "counter", "cache_hits_total", "prompts that began with a kept state", c.hits);
    add(out, "counter", "cache_misses_total", "prompts that did not", c.misses);
    add(out, "counter", "cache_stored_total", "states kept so far", c.stored);
    add(out, "counter", "cache_evicted_total", "states given up", c.evicted);
    out += step.text("step_seconds", "time of one engine step");
    out += first_token.text("first_token_seconds", "from the request to its first token");
    out += whole.text("request_seconds", "from the request to the end of its answer");
    return out;
}

}  // namespace quern
