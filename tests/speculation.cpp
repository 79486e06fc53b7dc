// Speculation: answers with drafts are those without, to the last bit of every logit, whatever is drafted; and drafts are
// really verified, accepted and rolled back.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "tools/bench/quality.h"
#include "tools/engine/answer_reader.h"
#include "tools/engine/lookup_drafter.h"
#include "tools/engine/paid_drafter.h"
#include "tools/engine/replay_drafter.h"
#include "tools/engine/speculation.h"

namespace quern {
namespace {

using test::cpu, test::device, test::parity, test::random_ids;

/// Tokens of an answer and the logits that each was chosen from, as they left the model.
struct Answer {
    Result result;
    std::vector<float> logits;

    /// Compares bits, so that NaN and -0 count.
    bool operator==(const Answer& o) const {
        return result.tokens == o.result.tokens && result.reason == o.result.reason &&
               logits.size() == o.logits.size() &&
               std::memcmp(logits.data(), o.logits.data(), logits.size() * sizeof(float)) == 0;
    }
};

/// What the cases do to a request; the same for number i wherever it is made.
using Change = std::function<void(Request&, size_t i)>;

/// Requests, and their answers without drafts.
class Requests {
  public:
    Requests(test::Loaded& l, int64_t context, Change change)
        : l_(l), context_(context), change_(std::move(change)) {
        for (unsigned i = 0; i < 8; ++i) prompts_.push_back(random_ids(*l.model, 1 + i * 37, i));
        expected = run({});
    }
    size_t count() const { return prompts_.size(); }

    /// All at once, on an engine of this many sequences.
    std::vector<Answer> run(EngineOptions options, int times = 1) {
        options.context = context_;
        Engine engine(*l_.model, *l_.backend, options);
        std::vector<Answer> answers;
        while (times-- > 0) answers = run(engine);
        return answers;
    }
    std::vector<Answer> run(Engine& engine) {
        std::vector<Answer> answers(prompts_.size());
        std::vector<RequestId> ids;
        for (size_t i = 0; i < prompts_.size(); ++i) ids.push_back(engine.submit(request(i, answers[i])));
        while (engine.step()) {
        }
        for (size_t i = 0; i < ids.size(); ++i) answers[i].result = engine.take(ids[i]);
        return answers;
    }
    /// With drafts of this quality.
    EngineOptions drafting(std::vector<double> acceptance, int64_t sequences, int64_t draft_max = 7) {
        auto drafter = std::make_shared<ReplayDrafter>(std::move(acceptance), 5);
        for (size_t i = 0; i < prompts_.size(); ++i) drafter->expect(prompts_[i], expected[i].result.tokens);
        return {.sequences = sequences,
                .speculation = {.kind = DrafterKind::automatic, .draft_max = draft_max},
                .drafter = drafter};
    }
    std::vector<Answer> expected;

  private:
    Request request(size_t i, Answer& to) {
        Request r;
        r.prompt = prompts_[i];
        r.sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
        r.sampling.seed = i;
        r.max_tokens = 20 + static_cast<int64_t>(i);
        r.boundaries = {static_cast<int64_t>(prompts_[i].size() / 2)};
        r.on_logits = [&to](int32_t, std::span<const float> row) {
            to.logits.insert(to.logits.end(), row.begin(), row.end());
        };
        r.drafts.full = true;
        if (change_) change_(r, i);
        return r;
    }

    test::Loaded& l_;
    int64_t context_;
    Change change_;
    std::vector<std::vector<int32_t>> prompts_;
};

int64_t sum(const std::vector<Answer>& answers, int64_t Result::*field) {
    int64_t total = 0;
    for (const Answer& a : answers) total += a.result.*field;
    return total;
}

/// Drafts by the MTP layer, and others in place of them, alone and together, with kept states, on both faces of the CPU.
void check_mtp(const char* checkpoint, int64_t context, const Change& change) {
    CAPTURE(checkpoint);
    for (const auto make : {cpu, device}) {
        test::Loaded l(parity(checkpoint), make());
        l.model = load_model(parity(checkpoint), *l.backend, {.tokenizer = false, .mtp = MtpUse::required});
        Requests requests(l, context, change);
        for (const double acceptance : {0.0, 0.6, 1.0})
            for (const int64_t sequences : {1, 8}) {
                CAPTURE(acceptance);
                CAPTURE(sequences);
                EngineOptions options = requests.drafting({acceptance, acceptance / 2}, sequences);
                if (acceptance == 0.0) options.drafter = nullptr;
                options.speculation.kind = DrafterKind::mtp;
                options.cache_bytes = 16 << 20;
                const auto found = requests.run(options, 2);
                for (size_t i = 0; i < found.size(); ++i) {
                    CAPTURE(i);
                    CHECK(found[i] == requests.expected[i]);
                }
                CHECK(sum(found, &Result::drafted) > 0);
            }
    }
}

/// Drafts of every quality, alone and together, on both faces of the CPU.
void check_identity(const char* checkpoint, int64_t context, const Change& change) {
    CAPTURE(checkpoint);
    for (const auto make : {cpu, device}) {
        test::Loaded l(parity(checkpoint), make());
        Requests requests(l, context, change);
        for (const auto& acceptance : {std::vector<double>(15, 1.0), std::vector<double>(15, 0.0),
                                       std::vector<double>{0.9, 0.7, 0.6, 0.5, 0.3, 0.2, 0.1}})
            for (const int64_t sequences : {1, 5}) {
                CAPTURE(acceptance[0]);
                CAPTURE(sequences);
                const int64_t most = acceptance.size() > 7 ? 15 : 7;
                const auto found = requests.run(requests.drafting(acceptance, sequences, most));
                for (size_t i = 0; i < found.size(); ++i) {
                    CAPTURE(i);
                    CHECK(found[i] == requests.expected[i]);
                }
                const int64_t drafted = sum(found, &Result::drafted),
                              accepted = sum(found, &Result::accepted);
                CHECK(drafted > 0);
                if (acceptance[0] == 0.0) CHECK(accepted == 0);
                if (acceptance[0] == 1.0) CHECK(accepted > drafted / 2);
            }
    }
}

/// A question of the demo's, asked for the second time after its first answer, so that lookup has something to find.
std::vector<int32_t> asked_again(const Model& model, const Question& q) {
    std::vector<Message> messages = q.messages;
    messages.push_back({.role = "assistant", .content = q.expect});
    messages.insert(messages.end(), q.messages.begin(), q.messages.end());
    return encode_prompt(model.chat().render(messages, q.tools, {.thinking = q.thinking}),
                         *model.tokenizer());
}

/// The end of the longest earlier occurrence, by comparing with all.
size_t find_slowly(const std::vector<int32_t>& tokens) {
    size_t best = 0, longest = TokenIndex::kFewestMatched - 1;
    for (size_t end = tokens.size() - 1; end > 0; --end) {
        size_t length = 0;
        while (length < std::min<size_t>(end, 64) &&
               tokens[end - 1 - length] == tokens[tokens.size() - 1 - length])
            ++length;
        if (length > longest) longest = length, best = end;
    }
    return best;
}

TEST_SUITE("cpu") {
    TEST_CASE(
        "lookup finds the longest earlier occurrence of eight tokens or more, of equal ones the latest") {
        std::mt19937 random(1);
        std::vector<int32_t> tokens;
        TokenIndex index;
        size_t found = 0;
        for (int i = 0; i < 3000; ++i) {
            // Mostly copies of what came before, of any length.
            if (tokens.size() > 20 && random() % 3 == 0) {
                const size_t from = random() % (tokens.size() - 20), count = 5 + random() % 12;
                for (size_t k = 0; k < count; ++k) tokens.push_back(tokens[from + k]);
            }
            tokens.push_back(static_cast<int32_t>(random() % 500));
            if (random() % 2 == 0) tokens.push_back(tokens[tokens.size() / 2]);
            index.extend(tokens);
            const size_t expected = find_slowly(tokens);
            found += expected > 0;
            CHECK(index.find(tokens) == expected);
        }
        CHECK(TokenIndex().find(std::vector<int32_t>(7, 1)) == 0);
    }

    TEST_CASE("lookup drafts what followed, goes on in loops, and needs eight tokens") {
        LookupDrafter drafter;
        const auto propose = [&](std::vector<int32_t> tokens, int64_t most) {
            Sequence s;
            s.tokens = std::move(tokens);
            Draft draft{&s, most};
            drafter.propose({&draft, 1});
            drafter.release(s);
            return draft.tokens;
        };
        CHECK(propose({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7, 8}, 2) ==
              std::vector<int32_t>{9, 10});
        CHECK(propose({1, 2, 3, 4, 5, 6, 7, 9, 10, 1, 2, 3, 4, 5, 6, 7}, 2).empty());
        CHECK(propose({5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5}, 5) == std::vector<int32_t>{6, 5, 6, 5, 6});
        CHECK(propose({}, 3).empty());
    }

    TEST_CASE("drafts, whatever they are worth, change no bit of an answer") {
        check_identity("base/ct", 512, {});
        check_identity("dense/ct", 512, {});
    }

    TEST_CASE("drafts by an MTP layer change no bit of an answer" * doctest::test_suite("slow")) {
        check_mtp("vision_mtp/ct", 512, {});
        check_mtp("tied_text/modelopt", 289, [](Request& r, size_t i) {
            r.max_tokens = i % 3 == 0 ? 1000 : static_cast<int64_t>(1 + i);
        });
        check_mtp("vision_mtp/bf16", 512, [](Request& r, size_t i) {
            r.sampling.repetition_penalty = 1.3f;
            r.max_tokens = 45;
            if (i % 2 == 0) r.allow = [](int32_t id) { return id % 3 != 0; };
            if (i % 4 < 2)
                r.force = [n = size_t{0}]() mutable {
                    return ++n % 6 == 0 ? std::vector<int32_t>(3 + n, 40) : std::vector<int32_t>();
                };
            if (i == 5) r.on_token = [left = 9](int32_t) mutable { return left-- > 0; };
            r.drafts.full = i % 3 > 0;
        });
    }

    TEST_CASE("drafts change nothing where the context or the answer ends") {
        check_identity("base/ct", 289, [](Request& r, size_t i) {
            r.max_tokens = i % 3 == 0 ? 1000 : static_cast<int64_t>(1 + i);
        });
    }

    TEST_CASE("drafts change nothing with penalties, bias, refused tokens, forced tokens and stop ids") {
        check_identity("base/ct", 512, [](Request& r, size_t i) {
            r.sampling.repetition_penalty = 1.3f;
            r.sampling.frequency_penalty = 0.4f;
            r.sampling.logit_bias = {{3, 4.0f}};
            r.max_tokens = 45;
            if (i % 2 == 0) r.allow = [](int32_t id) { return id % 3 != 0; };
            if (i % 3 == 0) r.stop_ids = {17, 18, 19, 20};
            if (i % 4 < 2)
                r.force = [n = size_t{0}]() mutable {
                    return ++n % 6 == 0 ? std::vector<int32_t>(3 + n, 40) : std::vector<int32_t>();
                };
        });
    }

    TEST_CASE("drafts change nothing when an answer is given up in the middle of a round") {
        check_identity("base/ct", 512, [](Request& r, size_t i) {
            r.on_token = [left = 5 + i](int32_t) mutable { return left-- > 0; };
        });
    }

    TEST_CASE("drafts change nothing where states are kept, and kept states hold no drafts") {
        for (const auto make : {cpu, device}) {
            test::Loaded l(parity("base/ct"), make());
            Requests requests(l, 512, {});
            EngineOptions options = requests.drafting({0.8, 0.6, 0.4}, 3);
            options.cache_bytes = 64 << 20;
            Engine engine(*l.model, *l.backend, [&] {
                options.context = 512;
                return options;
            }());
            for (int times = 0; times < 3; ++times) CHECK(requests.run(engine) == requests.expected);
            CHECK(engine.cache_stats().hits > 0);
        }
    }

    TEST_CASE("the demo's answers are the same with lookup, greedy and drawn, alone and eight together" *
              doctest::test_suite("slow")) {
        test::Loaded l(test::source_dir() + "/models/demo", cpu(), true);
        const auto questions = read_questions(test::source_dir() + "/models/demo/eval.jsonl");
        const auto answers = [&](EngineOptions options) {
            options.context = 1024;
            Engine engine(*l.model, *l.backend, options);
            std::vector<RequestId> ids;
            std::vector<Result> results;
            for (size_t i = 0; i < 32; ++i) {
                Request r;
                r.prompt = asked_again(*l.model, questions[i * 9]);
                r.sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
                r.sampling.seed = i;
                r.max_tokens = 60;
                r.stop_ids = l.model->generation().eos_ids;
                r.drafts.full = true;
                ids.push_back(engine.submit(std::move(r)));
            }
            while (engine.step()) {
            }
            for (const RequestId id : ids) results.push_back(engine.take(id));
            return results;
        };
        const auto plain = answers({});
        for (const int64_t sequences : {1, 8}) {
            const auto found =
                answers({.sequences = sequences, .speculation = {.kind = DrafterKind::lookup}});
            int64_t accepted = 0;
            for (size_t i = 0; i < plain.size(); ++i) {
                CHECK(found[i].tokens == plain[i].tokens);
                accepted += found[i].accepted;
            }
            CHECK(accepted > 50);
        }
    }

    TEST_CASE("nothing is copied from the marker of a call to the end of its name") {
        test::Loaded l(test::source_dir() + "/models/demo", cpu(), true);
        const auto questions = read_questions(test::source_dir() + "/models/demo/eval.jsonl");
        const auto q = std::find_if(questions.begin(), questions.end(), [](const Question& one) {
            return !one.tools.empty() && one.expect[0] == '<';
        });
        REQUIRE(q != questions.end());
        AnswerReader reader(*l.model, {.tools = q->tools});
        Request request;
        reader.attach(request, [](const AnswerDelta&) { return true; });
        REQUIRE(request.copies);
        const Tokenizer& tokenizer = *l.model->tokenizer();
        const ChatFormat& format = l.model->chat();
        const auto call = tokenizer.encode(q->expect, Tokenizer::Markers::control);
        std::vector<int32_t> text = tokenizer.encode("So be it. ", Tokenizer::Markers::literal);
        const size_t before = text.size();
        text.insert(text.end(), call.begin(), call.end());
        CHECK(request.copies(text) == before);
        CHECK(request.copies(std::span(text).first(before)) == before);
        std::string written;
        for (const int32_t id : call) {
            request.on_token(id);
            written += tokenizer.piece(id);
            const size_t name = written.find(format.call_name_end, std::string(format.call_marker).size());
            CHECK(request.copies(std::span(text).first(before)) == (name == std::string::npos ? 0 : before));
        }
    }

    TEST_CASE("snapshots leave the journal out, and may not be taken while it holds tokens") {
        test::Loaded l(parity("base/ct"), cpu());
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32, .journal = 8});
        int64_t journal = 0;
        for (const StateSpec& spec : specs) journal += spec.transient() ? spec.bytes() : 0;
        CHECK(journal > 0);
        CHECK(recurrent_bytes(specs) + journal == slot_bytes(specs));
        StatePool pool(*l.backend, specs, 1, 2);
        SequenceState s = pool.acquire();
        s.length = 5;
        pool.grow(s, s.length);
        s.journaled = 2;
        CHECK_THROWS_WITH_AS(pool.snapshot(s), doctest::Contains("journal"), Error);
        s.journaled = 0;
        Snapshot kept = pool.snapshot(s);
        pool.release(kept);
        pool.release(s);
    }

    TEST_CASE("what is drafted is verified in fewer steps") {
        auto owned = std::make_unique<test::CountedBackend>(int64_t{1} << 34);
        test::CountedBackend& backend = *owned;
        test::Loaded l(parity("base/ct"), std::move(owned));
        Requests requests(l, 512, {});
        int64_t steps = 0;
        backend.before_run = [&] { ++steps; };
        requests.run({});
        const int64_t plain = std::exchange(steps, 0);
        requests.run(requests.drafting(std::vector<double>(3, 1.0), 1, 3));
        CHECK(steps < plain / 2);
    }

    TEST_CASE("drafts as long as pays: the same answers") {
        for (const auto make : {cpu, device}) {
            test::Loaded l(parity("base/ct"), make());
            Requests requests(l, 512, [](Request& r, size_t) {
                r.max_tokens = 100;
                r.drafts.full = false;
            });
            for (const int64_t sequences : {1, 5}) {
                EngineOptions options = requests.drafting({0.9, 0.8, 0.7, 0.6, 0.5}, sequences);
                CHECK(requests.run(options) == requests.expected);
            }
        }
    }

    TEST_CASE("drafts that take longer than they save are given up, however right they are") {
        struct Slow final : Drafter {
            const char* name() const override { return "slow"; }
            void propose(std::span<Draft> drafts) override {
                std::this_thread::sleep_for(std::chrono::milliseconds(200));
                for (Draft& d : drafts) d.tokens.assign(static_cast<size_t>(d.most), 0);
            }
        };
        test::Loaded l(parity("base/ct"), cpu());
        Requests requests(l, 512, [](Request& r, size_t) {
            r.max_tokens = 100;
            r.drafts.full = false;
        });
        const auto drafted = [&](bool slow) {
            EngineOptions options = requests.drafting(std::vector<double>(4, 1.0), 1, 4);
            if (slow)
                options.drafter = std::make_shared<PaidDrafter>(options.drafter, std::make_shared<Slow>());
            const auto found = requests.run(options);
            CHECK(found == requests.expected);
            return sum(found, &Result::drafted);
        };
        const int64_t paid = drafted(true);
        CHECK(paid > 0);
        CHECK(paid < drafted(false) / 4);
    }

    TEST_CASE("drafts of tokens that do not exist, and too long ones, do no harm") {
        struct Broken final : Drafter {
            const char* name() const override { return "broken"; }
            void propose(std::span<Draft> drafts) override {
                for (Draft& d : drafts)
                    d.tokens.assign(static_cast<size_t>(d.most), count++ % 2 == 0 ? -1 : 1 << 30);
            }
            int count = 0;
        };
        test::Loaded l(parity("base/ct"), cpu());
        Requests requests(l, 512, {});
        EngineOptions options = requests.drafting({1.0}, 2);
        options.drafter = std::make_shared<Broken>();
        CHECK(requests.run(options) == requests.expected);
    }

    TEST_CASE("a request may ask for no drafts, for fewer, and not for those that are not made") {
        test::Loaded l(parity("base/ct"), cpu());
        const auto run = [&](DraftOptions wanted) {
            Requests requests(l, 512, [&](Request& r, size_t) { r.drafts = wanted; });
            const auto found = requests.run(requests.drafting(std::vector<double>(7, 1.0), 1));
            CHECK(found == requests.expected);
            return sum(found, &Result::drafted);
        };
        CHECK(run({.kind = DrafterKind::none}) == 0);
        CHECK(run({.most = 0}) == 0);
        const int64_t one = run({.most = 1, .full = true});
        CHECK(one > 0);
        CHECK(one < run({.full = true}));
        Engine engine(*l.model, *l.backend, {.context = 512});
        Request r;
        r.prompt = {1};
        r.drafts.kind = DrafterKind::lookup;
        CHECK_THROWS_WITH_AS(engine.submit(r), doctest::Contains("--spec none"), Error);
    }
}

}  // namespace
}  // namespace quern
