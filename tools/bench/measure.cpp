#include "tools/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/cpu/thread_pool.h"
#include "ggml-like/op.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/norm_linear.h"
#include "models/model.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v.empty() ? 0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

std::vector<int32_t> random_tokens(const Model& model, int64_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<uint32_t>(model.info().vocab));
    return ids;
}

std::string fnv1a(const std::vector<int32_t>& ids) {
    uint64_t h = 0xcbf29ce484222325u;
    for (int32_t id : ids) h = (h ^ static_cast<uint32_t>(id)) * 0x100000001b3u;
    return fmt::format("{:016x}", h);
}

}  // namespace

std::string BenchTest::name() const {
    std::string text;
    if (prompt > 0) text += fmt::format("pp{}", prompt);
    if (answer > 0) text += fmt::format("{}tg{}", text.empty() ? "" : "+", answer);
    if (parallel > 1) text += fmt::format(" x{}", parallel);
    if (depth > 0) text += fmt::format(" @ d{}", depth);
    if (drafts.kind == DrafterKind::none) return text;
    return text + (drafts.full ? fmt::format(" n={}", drafts.most) : " n=auto");
}

namespace {
constexpr int64_t kWatchedTokens = 512;  // of each sequence, at most, after the runs of a test that goes on

bool drafts(const BenchTest& test) { return test.drafts.kind != DrafterKind::none; }

/// Tokens of a sequence in so many runs of a test that goes on, the first and those for the watcher included. With drafts a run may
/// end in the middle of a step's tokens, and some sequences are ahead of others: by less than half of the tokens.
int64_t going_on(const BenchTest& test, int repetitions) {
    const int64_t runs = 1 + repetitions;
    const int64_t ahead = !drafts(test) ? 0 : kMaxDraft + (test.parallel > 1 ? test.answer / 2 : 0);
    return runs * (test.answer + ahead) + kWatchedTokens;
}
}  // namespace

int64_t BenchTest::context(int64_t prompt_rows, int repetitions) const {
    const int64_t steps = parallel > 1 && answer > 0 ? parallel * (depth / prompt_rows + 2) : 0;
    const int64_t waiting = steps * (quern::drafts(*this) ? 1 + kMaxDraft : 1);
    const int64_t answers = goes_on() ? going_on(*this, repetitions) : answer;
    return prompt + answers + depth + waiting + 2;
}

double Samples::mean_rate() const {
    double sum = 0;
    for (double s : seconds) sum += static_cast<double>(tokens) / s;
    return sum / static_cast<double>(seconds.size());
}

double Samples::stddev_rate() const {
    if (seconds.size() < 2) return 0;
    const double mean = mean_rate();
    double sum = 0;
    for (double s : seconds) sum += std::pow(static_cast<double>(tokens) / s - mean, 2);
    return std::sqrt(sum / static_cast<double>(seconds.size() - 1));
}

double Samples::median_rate() const {
    std::vector<double> rates;
    for (double s : seconds) rates.push_back(static_cast<double>(tokens) / s);
    return median(rates);
}

namespace {

/// What came of one run.
struct Run {
    double seconds = 0;
    std::vector<std::vector<int32_t>> prompts;
    std::vector<Result> results;
};

/// One run of a single sequence.
Run run_one(Engine& engine, const BenchTest& test) {
    // The measured prompt comes after `depth` tokens; without one, decoding needs a first token.
    const int64_t before = test.depth, prompt = std::max<int64_t>(before + test.prompt, 1);
    Request request;
    request.prompt = random_tokens(engine.model(), prompt, 1234);
    request.sampling.temperature = 0;
    request.max_tokens = std::max<int64_t>(test.answer + (test.prompt > 0 ? 0 : 1), 1);
    request.drafts = test.drafts;
    Run run{.prompts = {request.prompt}};
    const Clock::time_point begin = Clock::now();
    double prompt_seconds = 0;
    Clock::time_point depth_done = begin;
    request.on_prefill = [&](int64_t done) {
        if (done <= before) depth_done = Clock::now();
        if (done == prompt) prompt_seconds = since(depth_done);
    };
    const Result& result = run.results.emplace_back(engine.run(std::move(request)));
    if (result.reason == FinishReason::error) FAIL(runtime, "{}", result.error);
    run.seconds =
        (test.prompt > 0 ? prompt_seconds : 0) + (test.answer > 0 ? result.timing.decode_seconds : 0);
    return run;
}

/// Sequences that run together, each with a random prompt.
class Crowd {
  public:
    Crowd(Engine& engine, const BenchTest& test, std::vector<std::vector<int32_t>>& prompts)
        : engine_(engine), tokens_(static_cast<size_t>(test.parallel), 0), most_(tokens_.size(), kAny) {
        for (size_t i = 0; i < tokens_.size(); ++i) {
            Request request;
            request.prompt = random_tokens(engine.model(), std::max<int64_t>(test.depth + test.prompt, 1),
                                           static_cast<uint32_t>(1234 + i));
            request.sampling.temperature = 0;
            request.drafts = test.drafts;
            request.on_token = [this, i](int32_t) { return ++tokens_[i] < most_[i]; };
            prompts.push_back(request.prompt);
            ids_.push_back(engine.submit(std::move(request)));
        }
    }
    /// Runs until every sequence has a token.
    void begin() {
        while (std::find(tokens_.begin(), tokens_.end(), 0) != tokens_.end())
            if (!engine_.step()) break;
    }
    /// Runs until every sequence has `count` tokens more. Returns how many those were together.
    int64_t go_on(int64_t count) {
        const std::vector<int64_t> before = tokens_;
        const auto missing = [&] {
            for (size_t i = 0; i < tokens_.size(); ++i)
                if (tokens_[i] < before[i] + count) return true;
            return false;
        };
        while (missing())
            if (!engine_.step())
                FAIL(runtime, "a sequence ended before its answer: the context is too small");
        return std::accumulate(tokens_.begin(), tokens_.end(), int64_t{0}) -
               std::accumulate(before.begin(), before.end(), int64_t{0});
    }
    /// Runs until every sequence has `count` tokens more, and ends them. Returns how many those were together.
    int64_t finish(int64_t count) {
        const int64_t before = std::accumulate(tokens_.begin(), tokens_.end(), int64_t{0});
        for (size_t i = 0; i < tokens_.size(); ++i) most_[i] = std::max<int64_t>(tokens_[i] + count, 1);
        while (engine_.step()) {
        }
        return std::accumulate(tokens_.begin(), tokens_.end(), int64_t{0}) - before;
    }
    std::vector<Result> results(int64_t least) {
        std::vector<Result> all;
        for (size_t i = 0; i < ids_.size(); ++i) {
            const Result& result = all.emplace_back(engine_.take(ids_[i]));
            if (result.reason == FinishReason::error) FAIL(runtime, "{}", result.error);
            if (tokens_[i] < least)
                FAIL(runtime, "sequence {} ended after {} tokens instead of {}: the context is too small", i,
                     tokens_[i], least);
        }
        return all;
    }

  private:
    static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
    Engine& engine_;
    std::vector<int64_t> tokens_;  // that a sequence has
    std::vector<int64_t> most_;    // that end it
    std::vector<RequestId> ids_;
};

/// Seconds of parallel * answer tokens, at the speed of `tokens`.
double seconds_of(const BenchTest& test, double seconds, int64_t tokens) {
    return seconds * static_cast<double>(test.parallel * test.answer) /
           static_cast<double>(std::max<int64_t>(tokens, 1));
}

/// Prompts of many sequences, or answers: from the step after which all of them answer. `on_begin`: there.
Run run_parallel(Engine& engine, const BenchTest& test, const std::function<void()>& on_begin = {}) {
    Run run;
    Clock::time_point begin = Clock::now();
    Crowd crowd(engine, test, run.prompts);
    crowd.begin();
    run.seconds = since(begin);
    if (on_begin) on_begin();
    begin = Clock::now();
    const int64_t tokens = crowd.finish(test.answer);
    if (test.answer > 0) run.seconds = seconds_of(test, since(begin), tokens);
    run.results = crowd.results(test.answer + 1);
    engine.backend().synchronize();  // a step that was launched before the last answers ended
    return run;
}

void add_drafts(Samples& samples, const Run& run) {
    for (const Result& r : run.results) {
        samples.drafted += r.drafted;
        samples.accepted += r.accepted;
        samples.answered += std::max<int64_t>(0, static_cast<int64_t>(r.tokens.size()) - 1);
    }
}

void add(Samples& samples, const Run& run) {
    samples.seconds.push_back(run.seconds);
    add_drafts(samples, run);
}

/// All runs of a test that goes on; of the first, which warms up, only the tokens; then so many `more` that are not measured.
Run run_on(Engine& engine, const BenchTest& test, int repetitions, Samples& samples,
           const std::function<bool()>& watched, int64_t more = 0) {
    Run run;
    Crowd crowd(engine, test, run.prompts);
    crowd.begin();
    for (int i = -1; i < repetitions; ++i) {
        const Clock::time_point begin = Clock::now();
        const int64_t tokens = crowd.go_on(test.answer);
        if (i >= 0) samples.seconds.push_back(seconds_of(test, since(begin), tokens));
    }
    if (more > 0) crowd.go_on(more);
    constexpr int64_t kEach = 16;
    for (int64_t n = 0; n < kWatchedTokens - kEach && watched && watched(); n += kEach) crowd.go_on(kEach);
    crowd.finish(0);
    run.results = crowd.results(test.answer + 1);
    add_drafts(samples, run);
    engine.backend().synchronize();  // a step that was launched before the last answers ended
    return run;
}

Run run_once(Engine& engine, const BenchTest& test) {
    return test.parallel > 1 ? run_parallel(engine, test) : run_one(engine, test);
}

/// Tokens a second of the test without drafts, median; `drafter`, where there is one, then knows the answers.
double run_plain(Engine& engine, const BenchTest& test, int repetitions, ReplayDrafter* drafter) {
    const BenchTest plain = test.plain();
    const int runs = std::max(repetitions, 1);
    Samples samples;
    Run known;
    if (plain.goes_on()) {
        samples.tokens = plain.answer * plain.parallel;
        const int64_t most = going_on(test, repetitions), measured = plain.answer * (1 + runs);
        known = run_on(engine, plain, runs, samples, {}, drafter != nullptr ? most - measured : 0);
    } else {
        samples = run_test(engine, plain, runs);
        if (drafter != nullptr) known = run_once(engine, plain);
    }
    for (size_t i = 0; drafter != nullptr && i < known.prompts.size(); ++i)
        drafter->expect(known.prompts[i], known.results[i].tokens);
    return samples.median_rate();
}

/// Of all tokens, or of the first `most` of each sequence, since some answer longer while they wait for others.
std::string hash_of(const Run& run, int64_t most) {
    std::vector<int32_t> all;
    for (const Result& r : run.results)
        all.insert(all.end(), r.tokens.begin(),
                   r.tokens.begin() + std::min<int64_t>(most, static_cast<int64_t>(r.tokens.size())));
    return fnv1a(all);
}

struct OpTime {
    int calls = 0;
    double seconds = 0, bytes = 0, flops = 0;
    std::set<std::string> kernels;  // of one call each
};

}  // namespace

Samples run_test(Engine& engine, const BenchTest& test, int repetitions, ReplayDrafter* drafter,
                 const std::function<bool()>& watched) {
    Samples samples;
    samples.tokens = (test.prompt + test.answer) * test.parallel;
    if (drafts(test)) samples.plain_rate = run_plain(engine, test, repetitions, drafter);
    if (test.goes_on()) {
        samples.output_hash = hash_of(run_on(engine, test, repetitions, samples, watched), test.answer + 1);
        return samples;
    }
    for (int i = -1; i < repetitions; ++i) {
        const Run one = run_once(engine, test);
        samples.output_hash = hash_of(one, std::max<int64_t>(test.answer + 1, 1));
        if (i >= 0) add(samples, one);
    }
    while (watched && watched()) run_once(engine, test);
    return samples;
}

std::string op_table(Engine& engine, const BenchTest& test) {
    std::map<std::string, OpTime> table;
    int steps = 0;
    bool wanted = false;                                 // the step is of a kind that the test measures
    bool begun = test.parallel == 1 || test.prompt > 0;  // all sequences answer
    engine.backend().after_node = [&](const Node& node, double seconds, const std::string& kernels) {
        if (node.op == &kEmbed) {
            const bool prompt = node.params<EmbedParams>().kind == StepKind::prompt;
            wanted = begun && (prompt ? test.prompt > 0 : test.answer > 0);
            steps += wanted;
        }
        if (!wanted) return;
        const Cost cost = node.op->cost(node);
        const std::string part =
            node.name.substr(node.name.find('.') == std::string::npos ? 0 : node.name.find('.') + 1);
        OpTime& t = table[fmt::format("{} ({})", node.op->name, part)];
        ++t.calls;
        t.seconds += seconds;
        t.bytes += cost.weight_bytes + cost.state_bytes + cost.activation_bytes;
        t.flops += cost.flops;
        if (!kernels.empty()) t.kernels.insert(kernels);
    };
    BenchTest once = test;
    // Of drafts enough tokens that nearly all rounds have full ones.
    const int64_t rounds = 8, most = once.drafts.kind == DrafterKind::none ? 0 : kMaxDraft;
    if (once.prompt == 0) once.answer = std::min(once.answer, rounds * (1 + most));
    if (once.parallel > 1)
        run_parallel(engine, once, [&] { begun = true; });
    else
        run_one(engine, once);
    engine.backend().after_node = nullptr;
    std::string text = fmt::format(
        "\n{}: node by node, {} steps (times include launch gaps)\n\n"
        "| op | calls | us a call | GB/s | TFLOP/s | share | kernels |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |\n",
        test.name(), steps);
    double total = 0;
    for (const auto& [name, t] : table) total += t.seconds;
    for (const auto& [name, t] : table)
        text += fmt::format("| {} | {} | {:.1f} | {:.0f} | {:.1f} | {:.1f} % | {} |\n", name, t.calls,
                            t.seconds / t.calls * 1e6, t.bytes / t.seconds / 1e9, t.flops / t.seconds / 1e12,
                            100 * t.seconds / total, fmt::join(t.kernels, " or "));
    return text + fmt::format("| all, a step | | {:.0f} | | | | |\n", total / std::max(steps, 1) * 1e6);
}

double read_bandwidth(int threads) {
    constexpr int64_t kBytes = 1 << 29;
    std::vector<uint64_t> block(kBytes / 8, 1);
    cpu::ThreadPool pool(threads);
    std::vector<double> seconds;
    std::vector<uint64_t> sums(static_cast<size_t>(pool.size()) * 8);
    for (int pass = 0; pass < 5; ++pass) {
        const auto begin = Clock::now();
        pool.parallel_for(kBytes / 8, 1 << 17, [&](int64_t from, int64_t to, int worker) {
            uint64_t a = 0, b = 0, c = 0, d = 0;
            for (int64_t i = from; i + 3 < to; i += 4) {
                a += block[static_cast<size_t>(i)];
                b ^= block[static_cast<size_t>(i) + 1];
                c += block[static_cast<size_t>(i) + 2];
                d ^= block[static_cast<size_t>(i) + 3];
            }
            sums[static_cast<size_t>(worker) * 8] += a + b + c + d;
        });
        seconds.push_back(since(begin));
    }
    return static_cast<double>(kBytes) / median(seconds);
}

std::vector<LinearRow> measure_linear(Backend& backend) {
    struct Case {
        const char* format;
        DType dtype;
        ScaleKind scale;
        int64_t rows, columns;
    };
    std::vector<LinearRow> table;
    std::mt19937_64 random(7);
    for (const Case& c : {Case{"BF16", DType::BF16, ScaleKind::none, 65536, 4096},
                          Case{"NVFP4", DType::NVFP4, ScaleKind::nvfp4, 196608, 4096}}) {
        std::vector<uint64_t> data(static_cast<size_t>(dtype_bytes(c.dtype, c.rows * c.columns)) / 8);
        for (uint64_t& v : data) v = random() & 0xbfffbfffbfffbfffu;  // no huge exponents in BF16
        std::vector<uint8_t> scales(static_cast<size_t>(c.rows * c.columns / 16));
        for (uint8_t& v : scales) v = static_cast<uint8_t>(0x30 + random() % 16);
        Weight weight("bench", {{.name = "bench",
                                 .dtype = c.dtype,
                                 .rows = c.rows,
                                 .cols = c.columns,
                                 .data = data.data(),
                                 .scale_kind = c.scale,
                                 .scale = scales.data()}});
        Graph g;
        const Residual x{.h = g.input("h", DType::F32, {1, c.columns}),
                         .squares = g.input("squares", DType::F32, {1, 1})};
        g.output(norm_linear(g, "y", x, weight, 1e-6f, StepKind::prompt, DType::F32));
        Plan plan(std::move(g), backend);
        auto* in = plan.input<float>(plan.graph().inputs()[0]);
        for (int64_t i = 0; i < c.columns; ++i) in[i] = static_cast<float>(i % 7) - 3.0f;
        std::vector<double> seconds;
        for (int pass = 0; pass < 8; ++pass) {
            const auto begin = Clock::now();
            plan.run();
            backend.synchronize();
            if (pass > 0) seconds.push_back(since(begin));
        }
        table.push_back({c.format, c.rows, c.columns, median(seconds), static_cast<double>(weight.bytes())});
    }
    return table;
}

std::vector<BenchTest> with_drafts(const std::vector<BenchTest>& tests, const std::vector<int64_t>& lengths) {
    std::vector<BenchTest> out;
    for (BenchTest test : tests) {
        if (test.answer == 0 || lengths.empty()) {
            if (test.answer > 0) test.drafts = {.rows = DraftRows::frequent};
            out.push_back(test);
            continue;
        }
        for (const int64_t n : lengths) {
            test.drafts = {.most = n, .full = true, .rows = DraftRows::frequent};
            out.push_back(test);
        }
    }
    return out;
}

}  // namespace quern
