// Api: answers. A request's thread waits for what the engine's thread produces and writes it down.
#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "ggml-like/json_pull.h"
#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/serve/api.h"

namespace quern {

using nlohmann::ordered_json;
using namespace std::chrono_literals;

struct Api::Exchange {
    using Clock = Job::Clock;

    explicit Exchange(JobQueue& q) : queue(q) {}
    /// However the request ended, even without a reply: its jobs stop.
    ~Exchange() {
        for (auto& job : jobs) job->cancelled = true;
        queue.give_back(places);
    }

    JobQueue& queue;
    std::string id, path, remote, key;
    GenerationRequest request;
    std::unique_ptr<AnswerFormat> format;
    std::string ignored, not_enforced;  // names, for logs and headers
    std::function<bool()> closed, reset, nudge;
    bool half_closed = false;  // writing shows whether its client has gone
    std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
    std::vector<std::shared_ptr<Job>> jobs;
    std::vector<Choice> choices;
    int places = 0;            // reserved and not used yet
    std::vector<int> waiting;  // answers not submitted yet, by prompt
    int ended = 0;
    void submit(size_t job) {
        --places;
        queue.submit(jobs[job]);
    }
    /// The other answers to a prompt start from the state that the first one has left.
    void submit_others(int answer) {
        const auto each = static_cast<size_t>(request.choices), prompt = static_cast<size_t>(answer) / each;
        const int count = std::exchange(waiting[prompt], 0);
        for (int i = 1; i <= count; ++i) submit(prompt * each + static_cast<size_t>(i));
    }
    Clock::time_point begun = Clock::now(), looked = begun, nudged{}, deadline{};
    std::optional<Clock::time_point> first;

    double seconds(Clock::time_point to) const { return std::chrono::duration<double>(to - begun).count(); }
};

namespace {

/// The first of these names, short enough for a log line or a header, in plain ASCII.
std::string some_of(const std::vector<std::string>& names) {
    constexpr size_t kMost = 10;
    std::string out;
    for (size_t i = 0; i < std::min(names.size(), kMost); ++i)
        out.append(i > 0 ? "," : "").append(escaped(names[i], 60));
    if (names.size() > kMost) out += fmt::format(" and {} more", names.size() - kMost);
    return out;
}

ApiError error_of(const Outcome& o) {
    switch (o.end) {
        case Outcome::End::deadline:
            return {504, "timeout", "the request took longer than --timeout allows"};
        case Outcome::End::cancelled:
            return {503, "draining", "the server is shutting down"};
        default:
            return {o.error_status, o.error_code, o.error};
    }
}

bool failed(const Outcome& o) {
    return o.end == Outcome::End::error || o.end == Outcome::End::deadline ||
           o.end == Outcome::End::cancelled;
}

/// Follows one answer on the engine's thread, for requests that want to know how it goes.
class Pace {
  public:
    explicit Pace(int64_t prompt_tokens) { now_.prompt_tokens = prompt_tokens; }

    /// First with what was kept of the prompt.
    const Progress& prefill(int64_t done) {
        if (!begun_) {
            begun_ = Job::Clock::now();
            now_.cached_tokens = done;
        }
        now_.prompt_done = done;
        now_.timing.prefill_seconds = since(*begun_);
        return now_;
    }
    const Progress& answer(int64_t tokens) {
        if (!first_) first_ = Job::Clock::now();
        now_.answer_tokens = tokens;
        now_.timing.decode_seconds = since(*first_);
        return now_;
    }

  private:
    static double since(Job::Clock::time_point from) {
        return std::chrono::duration<double>(Job::Clock::now() - from).count();
    }

    Progress now_;
    std::optional<Job::Clock::time_point> begun_, first_;
};

}  // namespace

std::shared_ptr<Job> Api::make_job(const std::shared_ptr<Exchange>& x, int choice) const {
    auto job = std::make_shared<Job>();
    job->mailbox = x->mailbox;
    job->choice = choice;
    job->deadline = x->deadline;
    job->streamed = x->request.stream;
    prepare(*job, *x);
    job->renew = [this, weak = std::weak_ptr(x)](Job& again) {
        const std::shared_ptr<Exchange> exchange = weak.lock();
        if (exchange == nullptr || again.cancelled) return false;
        if (again.begun()) again.mailbox->push({.choice = again.choice, .again = true});
        prepare(again, *exchange);
        return true;
    };
    return job;
}

/// Makes the request of a job and the reader of its answer, which another replica may need anew.
void Api::prepare(Job& job, const Exchange& x) const {
    const GenerationRequest& g = x.request;
    const int choice = job.choice;
    auto reader = std::make_unique<AnswerReader>(engine_->model(), g.rules);
    Request& request = job.request = {};
    request.prompt = g.prompt_of(choice);
    request.images = g.images;
    const std::vector<int32_t> opening = reader->opening();
    request.prompt.insert(request.prompt.end(), opening.begin(), opening.end());
    request.boundaries = g.boundaries;
    request.sampling = g.sampling;
    request.sampling.seed += static_cast<uint64_t>(choice % g.choices);
    request.max_tokens = g.max_tokens;
    if (!g.ignore_eos) request.stop_ids = engine_->model().generation().eos_ids;
    request.use_cache = g.use_cache;
    request.conversation = g.conversation;
    request.drafts = g.drafts;
    const auto pace = g.return_progress || g.timings_per_token
                          ? std::make_shared<Pace>(static_cast<int64_t>(request.prompt.size()))
                          : nullptr;
    if (pace != nullptr)
        request.on_prefill = [raw = &job, choice, pace](int64_t done) {
            raw->tell({.choice = choice, .progress = pace->prefill(done)});
        };
    reader->attach(request, [choice, raw = &job, pace](const AnswerDelta& delta) {
        Event event{.choice = choice, .delta = delta};
        if (pace != nullptr) event.progress = pace->answer(raw->reader->tokens());
        return raw->deliver(std::move(event)) && !raw->cancelled;
    });
    job.set_reader(std::move(reader));
}

HttpReply Api::generate(const HttpRequest& r, GenerationRequest request, std::unique_ptr<AnswerFormat> format,
                        std::vector<std::string> ignored) {
    auto x = std::make_shared<Exchange>(replicas_.queue());
    x->id = r.id;
    x->path = r.path;
    x->remote = r.remote;
    x->key = api_key(r);
    x->closed = r.closed;
    x->reset = r.reset;
    x->nudge = r.nudge;
    x->request = std::move(request);
    x->format = std::move(format);
    x->ignored = some_of(ignored);
    x->not_enforced = some_of(x->request.not_enforced());
    x->deadline = x->begun + std::chrono::milliseconds(static_cast<int64_t>(options_.timeout * 1e3));
    for (const auto& prompt : x->request.prompts)
        if (static_cast<int64_t>(prompt.size()) >= engine_->context())
            throw ApiError(
                400, "context_length_exceeded",
                fmt::format("the prompt has {} tokens, but this server's maximum context length is {} tokens",
                            prompt.size(), engine_->context()),
                x->request.rules.chat ? "messages" : "prompt");
    const int n = x->request.answers();
    if (const int64_t most = slot_count() + options_.queue; n > most)
        throw FieldError(x->request.rules.chat ? "n" : "prompt",
                         fmt::format("{} answers in one request; this server takes {} at once", n, most));
    for (int i = 0; i < n; ++i) x->jobs.push_back(make_job(x, i));
    x->choices.resize(static_cast<size_t>(n));
    x->waiting.assign(x->request.prompts.size(), x->request.choices - 1);
    if (!replicas_.queue().reserve(n)) {
        ++metrics_.refused;
        throw ApiError(429, "queue_full", "too many requests are waiting; try again in a moment");
    }
    ++metrics_.requests;
    x->places = n;
    for (int i = 0; i < n; i += x->request.choices) x->submit(static_cast<size_t>(i));
    if (const std::string id = x->format->id(); !id.empty()) {
        const std::lock_guard lock(running_mutex_);
        std::erase_if(running_, [](const auto& one) { return one.second.expired(); });
        running_[id] = x;
    }
    HttpReply reply = x->request.stream ? HttpReply{} : answer_whole(r, x);
    if (x->request.stream) {
        reply.type = x->format->stream_type();
        reply.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
        reply.stream = [this, x](const HttpWriter& write) { return answer_stream(*x, write); };
    }
    if (!x->ignored.empty()) reply.headers.emplace_back("X-Quern-Ignored", x->ignored);
    if (!x->not_enforced.empty()) reply.headers.emplace_back("X-Not-Enforced", x->not_enforced);
    return reply;
}

/// A client that sends no more may still wait for its answer: something must be written to it, to learn whether it has
/// gone. Of a stream that is a ping.
bool Api::has_gone(Exchange& x) {
    const auto now = Exchange::Clock::now();
    if (now - x.looked <= 100ms) return false;
    x.looked = now;
    x.half_closed = x.closed();
    if (x.half_closed && !x.request.stream && now - x.nudged > 1s) {
        x.nudged = now;
        if (!x.nudge()) return true;
    }
    return x.reset();
}

/// Waits a while for the next event. False: give up, the client or the server has gone.
bool Api::next(Exchange& x, std::optional<Event>& event) {
    event = x.mailbox->pop(100ms);
    const bool gone = has_gone(x);
    if (gone || state_ == State::stopping) {
        if (gone) log(x, 499, "client gone");
        return false;
    }
    if (!event) return true;
    if (event->again) {
        x.choices[static_cast<size_t>(event->choice)] = {};
        return true;
    }
    const bool reading = event->progress && event->progress->answer_tokens == 0;
    if (!x.first && !reading) {
        x.first = Exchange::Clock::now();
        metrics_.first_token.add(x.seconds(*x.first));
    }
    if (!reading) x.submit_others(event->choice);
    Choice& choice = x.choices[static_cast<size_t>(event->choice)];
    choice.add(event->delta);
    if (event->outcome) {
        choice.outcome = *event->outcome;
        ++x.ended;
        if (failed(choice.outcome)) ++metrics_.failed;
    }
    return true;
}

/// {"id", "action": "reasoning_end"}: an answer that is being written stops thinking.
HttpReply Api::control(const HttpRequest& r) {
    const Body body = parse(r);
    Fields f(body);
    const std::string id = f.string("id").value_or("");
    const ordered_json* action = f.value("action");
    if (action == nullptr) throw FieldError("action", "action is missing; there is reasoning_end");
    if (*action != "reasoning_end") throw wrong_value("action", "reasoning_end", *action);
    std::shared_ptr<Exchange> x;
    {
        const std::lock_guard lock(running_mutex_);
        if (const auto found = running_.find(id); found != running_.end()) x = found->second.lock();
    }
    if (x == nullptr || x->key != api_key(r))
        throw ApiError(404, "not_found", "no answer of that id is being written", "id");
    for (const auto& job : x->jobs) job->end_thinking();
    return {.body = dump({{"success", true}})};
}

HttpReply Api::answer_whole(const HttpRequest&, std::shared_ptr<Exchange> x) {
    std::optional<Event> event;
    while (x->ended < x->request.answers())
        if (!next(*x, event)) throw ApiError(503, "draining", "the server is shutting down");
    for (const Choice& choice : x->choices)
        if (failed(choice.outcome)) {
            const ApiError error = error_of(choice.outcome);
            log(*x, error.status, error.code.c_str());
            throw error;
        }
    metrics_.whole.add(x->seconds(Exchange::Clock::now()));
    log(*x, 200, x->choices[0].finish_reason());
    return {.body = dump(x->format->whole(x->choices))};
}

bool Api::answer_stream(Exchange& x, const HttpWriter& write) {
    const auto send = [&](const std::string& text) { return text.empty() || write(text); };
    const auto give_up = [&] {
        log(x, 499, "client gone");
        return false;
    };
    if (!send(x.format->begin())) return give_up();
    auto spoken = Exchange::Clock::now();
    auto patience = 1s;
    while (x.ended < x.request.answers()) {
        std::optional<Event> event;
        if (!next(x, event)) return false;
        std::string text;
        if (event) {
            if (event->progress) text = x.format->progress(event->choice, *event->progress);
            text += x.format->delta(event->choice, event->delta);
            const Choice& choice = x.choices[static_cast<size_t>(event->choice)];
            if (event->outcome && failed(choice.outcome)) {
                const ApiError error = error_of(choice.outcome);
                log(x, error.status, error.code.c_str());
                send(text + x.format->error(error));
                return true;
            }
            if (event->outcome) text += x.format->end(event->choice, choice);
        } else if (x.half_closed || Exchange::Clock::now() - spoken > patience) {
            text = x.format->ping();
            if (!x.half_closed) patience = 10s;
        }
        if (text.empty()) continue;
        if (!send(text)) return give_up();
        spoken = Exchange::Clock::now();
    }
    metrics_.whole.add(x.seconds(Exchange::Clock::now()));
    log(x, 200, x.choices[0].finish_reason());
    return send(x.format->close(x.choices));
}

void Api::log(const Exchange& x, int status, const char* end) const {
    if (!options_.log_requests) return;
    const Outcome& o = x.choices[0].outcome;
    int64_t answer = 0, cached = 0;
    for (size_t i = 0; i < x.choices.size(); ++i) {
        answer += x.choices[i].outcome.answer_tokens;
        if (i % static_cast<size_t>(x.request.choices) == 0) cached += x.choices[i].outcome.cached_tokens;
    }
    const double total = x.seconds(Exchange::Clock::now()), first = x.first ? x.seconds(*x.first) : total;
    const bool missed =
        x.request.prompts.size() == 1 && cached == 0 && o.prompt_tokens > 0 && options_.cache_bytes > 0;
    std::string line;
    if (options_.log_json) {
        ordered_json j = {{"time", std::time(nullptr)},
                          {"id", x.id},
                          {"path", x.path},
                          {"remote", x.remote},
                          {"model", x.request.model},
                          {"status", status},
                          {"end", end},
                          {"prompt_tokens", x.request.prompt_tokens()},
                          {"cached_tokens", cached},
                          {"answer_tokens", answer},
                          {"first_ms", first * 1e3},
                          {"total_ms", total * 1e3}};
        if (missed) j["diverged_at"] = o.diverged_at;
        if (!x.ignored.empty()) j["ignored"] = x.ignored;
        if (!x.not_enforced.empty()) j["not_enforced"] = x.not_enforced;
        line = dump(j);
    } else {
        line =
            fmt::format("{} {} {} {} {}: {} + {} tokens, {} cached, first after {:.0f} ms, {:.0f} ms in all",
                        x.id, x.remote, x.path, status, end, x.request.prompt_tokens(), answer, cached,
                        first * 1e3, total * 1e3);
        if (missed) line += fmt::format(", prefix diverged at token {}", o.diverged_at);
        if (!x.ignored.empty()) line += ", ignored fields: " + x.ignored;
        if (!x.not_enforced.empty()) line += ", not enforced: " + x.not_enforced;
    }
    std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace quern
