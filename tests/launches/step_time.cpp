#include "launches/step_time.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/ops/logits_top.h"
#include "models/weight_placement.h"
#include "tools/engine/answer_reader.h"
#include "tools/engine/engine.h"
#include "tools/serve/replicas.h"

namespace quern::test {
namespace {

constexpr int64_t kPromptTokens = 100, kAnswerTokens = 200;

/// What a step takes on an H200, measured.
double graph_seconds(int64_t sequences) {
    return sequences <= 1 ? 1.5e-3 : sequences <= 8 ? 3.3e-3 : sequences <= 32 ? 7.1e-3 : 9.9e-3;
}

/// Candidates of every row, likely ones of plain text first.
void write_candidates(void* to, size_t bytes, int64_t vocab) {
    constexpr size_t kRow = kTopWords * sizeof(int32_t);
    if (bytes % kRow != 0) return;
    auto* row = static_cast<int32_t*>(to);
    for (size_t rows = bytes / kRow, r = 0; r < rows; ++r, row += kTopWords) {
        for (int32_t i = 0; i < kTopLogits; ++i) {
            row[i] = static_cast<int32_t>((10 + r + static_cast<size_t>(i)) % static_cast<size_t>(vocab));
            const float logit = 10 - 0.2f * static_cast<float>(i);
            std::memcpy(row + kTopLogits + i, &logit, sizeof logit);
        }
        const float sum = 6;
        std::memcpy(row + 2 * kTopLogits, &sum, sizeof sum);
        row[kTopWords - 1] = 1;
    }
}

Request one_request(const Model& model, int64_t number) {
    Request r;
    for (int64_t i = 0; i < kPromptTokens; ++i)
        r.prompt.push_back(static_cast<int32_t>((number * 31 + i * 7) % model.info().vocab));
    r.sampling = {.temperature = 0.6f, .top_k = 20, .top_p = 0.95f, .seed = static_cast<uint64_t>(number)};
    r.max_tokens = kAnswerTokens;
    return r;
}

class StepTime {
  public:
    explicit StepTime(int64_t sequences)
        : sequences_(sequences),
          backend_(make_cuda_backend(cuda_stand_in::kH200)),
          model_(open_synthetic("qwen3.6-35b-a3b", "aeon",
                                {.text_from = std::string(QUERN_SOURCE_DIR) + "/models/demo"})) {
        place_weights(*model_, *backend_);
        engine_ = std::make_unique<Engine>(
            *model_, *backend_,
            EngineOptions{.context = 40960, .sequences = sequences, .cache_bytes = int64_t{1} << 30});
        cuda_stand_in::take_record();
    }

    double tokens_only() {
        return measured([&] {
            for (int64_t i = 0; i < sequences_; ++i) engine_->submit(one_request(*model_, i));
            while (engine_->step()) {
            }
        });
    }
    double with_text() {
        std::vector<std::unique_ptr<AnswerReader>> readers;
        size_t bytes = 0;
        return measured([&] {
            for (int64_t i = 0; i < sequences_; ++i) {
                readers.push_back(std::make_unique<AnswerReader>(*model_, rules()));
                Request r = one_request(*model_, i);
                readers.back()->attach(r, [&](const AnswerDelta& delta) {
                    bytes += delta.content.size() + delta.reasoning.size();
                    return true;
                });
                engine_->submit(std::move(r));
            }
            while (engine_->step()) {
            }
            CHECK(bytes > 0, "no text");
        });
    }
    /// Each client's thread only takes its events.
    double served() {
        Metrics metrics;
        Replicas replicas(metrics, sequences_);
        std::vector<std::thread> clients;
        std::atomic<int64_t> left = sequences_;
        const double idle = measured([&] {
            for (int64_t i = 0; i < sequences_; ++i) replicas.queue().submit(job(replicas, i, clients, left));
            replicas.run({{engine_.get(), "GPU 0"}}, [] {});
        });
        for (std::thread& t : clients) t.join();
        return idle;
    }

  private:
    static AnswerRules rules() { return {.thinking_open = true}; }

    std::shared_ptr<Job> job(Replicas& replicas, int64_t number, std::vector<std::thread>& clients,
                             std::atomic<int64_t>& left) {
        auto job = std::make_shared<Job>();
        job->mailbox = std::make_shared<Mailbox>();
        job->reader = std::make_unique<AnswerReader>(*model_, rules());
        job->request = one_request(*model_, number);
        job->reader->attach(job->request, [raw = job.get()](const AnswerDelta& delta) {
            return raw->deliver({.delta = delta});
        });
        clients.emplace_back([&replicas, &left, mailbox = job->mailbox] {
            for (std::optional<Event> event; !event || !event->outcome;)
                event = mailbox->pop(std::chrono::seconds(1));
            if (--left == 0) replicas.stop();
        });
        return job;
    }

    /// Microseconds that the device waits for an answer step; the median, since other programs may run here.
    template <typename F>
    double measured(const F& run) {
        cuda_stand_in::set_pace({.graph_seconds = graph_seconds(sequences_),
                                 .after_download = [vocab = model_->info().vocab](void* to, size_t bytes) {
                                     write_candidates(to, bytes, vocab);
                                 }});
        run();
        std::vector<double> idle = cuda_stand_in::take_device_time().idle_seconds;
        cuda_stand_in::set_pace({});
        cuda_stand_in::take_record();
        CHECK(!idle.empty(), "no answer steps");
        const auto middle = idle.begin() + static_cast<ptrdiff_t>(idle.size() / 2);
        std::nth_element(idle.begin(), middle, idle.end());
        return 1e6 * *middle;
    }

    int64_t sequences_;
    std::unique_ptr<Backend> backend_;
    std::unique_ptr<Model> model_;
    std::unique_ptr<Engine> engine_;
};

}  // namespace

std::string step_time_text(const std::vector<int64_t>& sequences) {
    std::string out =
        "| sequences | tokens only, µs | read as text | served |\n| ---: | ---: | ---: | ---: |\n";
    for (const int64_t n : sequences) {
        StepTime time(n);
        const double plain = time.tokens_only(), text = time.with_text(), served = time.served();
        out += fmt::format("| {} | {:.0f} | {:.0f} | {:.0f} |\n", n, plain, text, served);
    }
    return out;
}

}  // namespace quern::test
