// What steps launch on each of the stand-in's devices.
#include <algorithm>
#include <map>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "ggml-like/error.h"
#include "launches/step_list.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/speculation_options.h"

namespace quern::test {
namespace {

using cuda_stand_in::devices;

/// Why the step does not run; empty: it runs.
std::string refusal(PlacedModel& model, const BatchShape& step) {
    try {
        return model.launches(step).empty() ? "it launches nothing" : "";
    } catch (const Error& error) {
        return error.what();
    }
}

/// Calls `check` for each of the models on each device.
template <typename F>
void on_all_devices(const std::vector<ModelChoice>& models, F check) {
    for (int device = 0; device < static_cast<int>(devices().size()); ++device)
        for (const ModelChoice& choice : models) {
            const std::string where = devices()[static_cast<size_t>(device)].name, what = name_of(choice);
            CAPTURE(where);
            CAPTURE(what);
            PlacedModel model(choice, device);
            check(model);
        }
}

/// The same for steps of some models, of every kind that launches something else.
template <typename F>
void on_some_steps(F check) {
    on_all_devices(some_models(), [&](PlacedModel& model) {
        for (const BatchShape& step : some_steps(model)) {
            const std::string which = name_of(step);
            CAPTURE(which);
            check(model, step);
        }
    });
}

/// The first launch that differs; empty: none does.
std::string first_difference(const std::vector<Launch>& a, const std::vector<Launch>& b) {
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
        const std::string left = i < a.size() ? describe(a[i]) : "nothing",
                          right = i < b.size() ? describe(b[i]) : "nothing";
        if (i >= a.size() || i >= b.size() || !(a[i] == b[i]))
            return fmt::format("launch {}: {}; {}", i, left, right);
    }
    return {};
}

std::string first_difference(const std::vector<NodeLaunches>& a, const std::vector<NodeLaunches>& b) {
    if (a.size() != b.size()) return fmt::format("{} nodes; {}", a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i)
        if (!(a[i] == b[i]))
            return fmt::format("{}, {} {}; {}", a[i].node, first_difference(a[i].launches, b[i].launches),
                               a[i].refusal, b[i].refusal);
    return {};
}

TEST_CASE("launches: every step of every model runs") {
    std::vector<ModelChoice> models = all_models();
    for (const ModelChoice& choice : small_checkpoints()) models.push_back(choice);
    on_all_devices(models, [](PlacedModel& model) {
        for (const BatchShape& step : all_steps(model)) {
            const std::string which = name_of(step);
            CAPTURE(which);
            CHECK(refusal(model, step) == "");
        }
    });
}

TEST_CASE(
    "launches: dense weights of 2 to 8 rows, of in_proj 16, are read once, as far as a window reaches") {
    PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon"}, cuda_stand_in::kH200);
    constexpr int64_t kAttention = 9216 * 2048 / 64 * 36;                      // its in_proj, NVFP4
    constexpr int64_t kInProj = 12352 * 2048 * 2, kOutProj = 2048 * 4096 * 2;  // of a DeltaNet layer, BF16
    for (const int64_t rows : {1, 2, 8, 9, 16, 64}) {
        CAPTURE(rows);
        std::map<int64_t, int> launches;  // by the bytes of their windows
        for (const Launch& l : model.launches(model.answers(rows))) ++launches[l.window];
        const bool few = rows >= 2 && rows <= 8;
        CHECK(launches[kInProj] == (rows >= 2 && rows <= 16 ? 30 : 0));
        CHECK(launches[kOutProj] == (few ? 30 : 0));
        CHECK(launches[cuda_stand_in::kMostWindow] == (few ? 1 : 0));  // the head
        CHECK(launches.contains(kAttention) == few);
    }
}

TEST_CASE("launches: more than two rows of a sequence share their keys, as many as shared memory holds") {
    on_all_devices({{.shape = "qwen3.6-35b-a3b", .mix = "aeon"}}, [](PlacedModel& model) {
        const auto sharing = [&](int64_t rows, int64_t sequences) {
            std::string blocks;  // of one launch: clusters, KV heads and groups of rows
            int found = 0;
            for (const Launch& l : model.launches(model.answers(rows, sequences)))
                if (l.kernel->name.find("attention_decode_rows_kernel") != std::string::npos) {
                    ++found;
                    blocks = fmt::format("{} {} {} {}", l.kernel->name, l.grid.x / 8, l.grid.y, l.grid.z);
                }
            CHECK((found == 0 || found == 10));
            return blocks;
        };
        CHECK(sharing(8, 8) == "");
        CHECK(sharing(8, 4) == "");
        const std::string few = sharing(4, 1), more = sharing(8, 1), crowd = sharing(32, 8);
        CAPTURE(few);
        CAPTURE(more);
        CAPTURE(crowd);
        // KV heads and groups: pairs where all of their chunks run at once or four rows do not fit, else four, uneven at worst
        const bool h200 = model.device() == cuda_stand_in::kH200,
                   small = model.device() == cuda_stand_in::kRtx5090;
        CHECK(few.ends_with(h200 || small ? " 2 2" : " 2 1"));
        CHECK(more.ends_with(small ? " 2 4" : " 2 2"));
        CHECK(crowd.ends_with(small ? " 2 20" : " 2 14"));
    });
}

TEST_CASE("launches: what a node launches depends on the node alone") {
    on_some_steps([](PlacedModel& model, const BatchShape& step) {
        const std::vector<NodeLaunches> nodes = model.by_node(step);
        CHECK(first_difference(joined(nodes), model.launches(step)) == "");
        CHECK(first_difference(nodes, model.by_node_apart(step)) == "");
        CHECK(first_difference(nodes, model.each_alone(step)) == "");
    });
}

TEST_CASE("launches: a captured step is the same launches in the same order, each time that it runs") {
    on_some_steps([](PlacedModel& model, const BatchShape& step) {
        const std::vector<Launch> eager = model.launches(step);
        const Replay replay = model.replay(step);
        CHECK(first_difference(eager, replay.first) == "");
        CHECK(first_difference(eager, replay.second) == "");
        CHECK(replay.kernels == static_cast<int64_t>(eager.size()));
    });
}

TEST_CASE(
    "launches: steps that verify drafts run, captured ones too, and plain steps launch what they always do") {
    for (const char* shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape", "tiny"})
        for (int device = 0; device < static_cast<int>(devices().size()); ++device) {
            const std::string where = devices()[static_cast<size_t>(device)].name;
            CAPTURE(where);
            CAPTURE(std::string(shape));
            const ModelChoice plain{.shape = shape, .mix = "aeon"};
            ModelChoice journaled = plain;
            journaled.journal = 1 + kMaxDraft;
            const auto kernels = [](PlacedModel& m) { return m.replay(m.answers(8)).kernels; };
            const int64_t expected =
                kernels(*std::make_unique<PlacedModel>(plain, device));  // one fits at a time
            PlacedModel model(journaled, device);
            CHECK(kernels(model) == expected);
            for (const int64_t sequences : {1, 3, 8, 16, 32})
                for (const int64_t rows : {2, 5, 8, 12, 16, 17, 28, 64}) {
                    if (rows <= sequences) continue;
                    const BatchShape step = verify_shape(model.answers(rows, sequences), kMaxAnswerRows);
                    CHECK(step.tokens >= rows);
                    CHECK(step.tokens <= rows + rows / 4);
                    const std::string which = name_of(step);
                    CAPTURE(which);
                    CHECK(model.replay(step).kernels > 0);
                }
        }
}

bool is_of(const Launch& launch, const char* kernel) {
    return describe(launch).find(kernel) != std::string::npos;
}

/// The most sequences, of those that plans are made for, that one pass of the MTP layer drafts for.
int64_t most_drafts(PlacedModel& model) {
    int64_t most = 0;
    for (int64_t n = 1; n <= kMaxAnswerRows && refusal(model, model.mtp_drafts(n, n, 1)).empty();
         n = next_padded(n)) {
        const BatchShape chain =
            draft_shape(model.mtp_drafts(n, std::min(n + n / 2, kMaxAnswerRows), 3), kMaxAnswerRows);
        CHECK(model.replay(chain).kernels > model.replay(model.mtp_drafts(n, n, 1)).kernels);
        most = n;
    }
    return most;
}

TEST_CASE("launches: for how many sequences a pass of the MTP layer drafts") {
    using namespace cuda_stand_in;
    struct Promise {
        int device;
        const char *shape, *mix;
        int64_t sequences;
    };
    constexpr Promise kPromises[] = {
        {kH200, "qwen3.6-35b-a3b", "aeon", 64},          {kH200, "qwen3.6-35b-a3b", "qwen-fp8", 64},
        {kH200, "qwen3.6-27b-shape", "aeon", 64},        {kH200, "qwen3.6-27b-shape", "qwen-fp8", 64},
        {kRtx5090, "qwen3.6-35b-a3b", "aeon", 64},       {kRtx5090, "qwen3.6-27b-shape", "aeon", 64},
        {kRtx5090, "qwen3.6-27b-shape", "qwen-fp8", 64}, {kA100, "qwen3.6-35b-a3b", "aeon", 64},
        {kA100, "qwen3.6-27b-shape", "aeon", 64},        {kA100, "qwen3.6-27b-shape", "qwen-fp8", 64},
    };
    for (const Promise& p : kPromises) {
        CAPTURE(p.device);
        CAPTURE(std::string(p.shape));
        CAPTURE(std::string(p.mix));
        PlacedModel model({.shape = p.shape, .mix = p.mix, .mtp = true}, p.device);
        CHECK(most_drafts(model) == p.sequences);
    }
}

TEST_CASE("launches: prompts of a mixture have no kernel of their own for a norm's squares") {
    const auto of_norms = [](PlacedModel& model, int64_t rows) {
        const std::vector<Launch> all = model.launches(model.prompt(rows));
        return std::count_if(all.begin(), all.end(),
                             [](const Launch& launch) { return is_of(launch, "defer_kernel"); });
    };
    for (const int device : {cuda_stand_in::kH200, cuda_stand_in::kRtx5090, cuda_stand_in::kA100})
        for (const int64_t rows : {1, 50, 200, 1000}) {
            CAPTURE(rows);
            PlacedModel mixture({.shape = "qwen3.6-35b-a3b", .mix = "aeon"}, device);
            CHECK(of_norms(mixture, rows) == 0);
        }
    PlacedModel dense({.shape = "qwen3.6-27b-shape", .mix = "aeon"}, cuda_stand_in::kH200);
    CHECK(of_norms(dense, 200) == 128);  // one after each of its 64 layers' two products
}

TEST_CASE("launches: drafts of an MTP layer for one answer") {
    PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon", .mtp = true}, cuda_stand_in::kH200);
    const auto kernels = [&](int64_t drafts) { return model.replay(model.mtp_drafts(1, 4, drafts)).kernels; };
    CHECK(kernels(1) == 10);  // with the beginning, and the last row taken from four
    CHECK(kernels(2) == 18);
    CHECK(kernels(3) == 26);
    // A later draft's rows begin when all before them has ended: its attention reads keys before it waits.
    std::vector<bool> programmatic;
    int64_t heads = 0;
    for (const Launch& launch : model.launches(model.mtp_drafts(1, 4, 3))) {
        if (is_of(launch, "mtp_rows_kernel")) programmatic.push_back(launch.programmatic);
        heads += is_of(launch, "draft_token_one");
    }
    CHECK(programmatic == std::vector<bool>{true, false, false});
    CHECK(heads == 3);
}

TEST_CASE(
    "launches: the MTP layer catches up on every device, and steps that leave hidden states launch one "
    "kernel more") {
    std::vector<ModelChoice> models;
    for (const char* shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape", "tiny", "tiny-dense"})
        models.push_back({.shape = shape, .mix = "aeon", .mtp = true});
    for (ModelChoice choice : small_checkpoints())
        if (choice.shape.find("tied_text") != std::string::npos ||
            choice.shape.find("vision_mtp") != std::string::npos) {
            choice.mtp = true;
            models.push_back(choice);
        }
    on_all_devices(models, [](PlacedModel& model) {
        for (const int64_t rows : {1, 2, 3, 8, 16, 32, 64}) {
            CAPTURE(rows);
            CHECK(model.replay(model.mtp_catch_up(StepKind::answer, rows)).kernels > 0);
            BatchShape hidden = model.answers(rows);
            hidden.pass = Pass::hidden;
            std::vector<Launch> more = model.launches(hidden);
            const std::vector<Launch> plain = model.launches(model.answers(rows));
            // Before the head, whose first weights come meanwhile; behind it come its logits' highest.
            const auto ring = std::find_if(more.begin(), more.end(), [](const Launch& launch) {
                return is_of(launch, "write_ring_kernel");
            });
            REQUIRE(ring != more.end());
            CHECK(more.end() - ring >= 3);
            more.erase(ring);
            CHECK(first_difference(plain, more) == "");
        }
        for (const int64_t rows : {1, 63, 64, 200, 1024}) {
            CAPTURE(rows);
            CHECK(refusal(model, model.mtp_catch_up(StepKind::prompt, rows)) == "");
        }
    });
}

TEST_CASE("launches: passes of DFlash drafters, and steps that make their keys and values") {
    const ModelChoice models[] = {{.shape = "qwen3.6-35b-a3b", .mix = "aeon", .drafter = "new"},
                                  {.shape = "qwen3.6-35b-a3b", .mix = "aeon", .drafter = "old"},
                                  {.shape = "qwen3.6-27b-shape", .mix = "aeon", .drafter = "new"}};
    for (const ModelChoice& choice : models) {
        CAPTURE(choice.drafter);
        PlacedModel model(choice, cuda_stand_in::kH200);
        for (const int64_t rows : {2, 4, 8, 16}) {
            CAPTURE(rows);
            CHECK(model.replay(model.blocks(1, rows)).kernels > 0);
            CHECK(model.replay(model.blocks(64 / rows, rows)).kernels > 0);
            CHECK(model.replay(model.tapped(rows)).kernels > model.replay(model.answers(rows, 1)).kernels);
        }
    }
}

TEST_CASE("launches: kernels of an answer step of the 35B") {
    struct Promise {
        int device;
        int64_t rows, kernels;
    };
    using namespace cuda_stand_in;
    // PERFORMANCE.md states those of an H200.
    constexpr Promise kPromises[] = {
        {kH200, 1, 203},     {kH200, 2, 203},  {kH200, 8, 203},    {kH200, 16, 283},
        {kH200, 32, 283},    {kH200, 64, 283}, {kRtx5090, 1, 203}, {kRtx5090, 8, 283},
        {kRtx5090, 64, 283}, {kA100, 1, 203},  {kA100, 8, 203},    {kA100, 64, 283},
    };
    for (int device = 0; device < static_cast<int>(devices().size()); ++device) {
        PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon"}, device);
        for (const Promise& p : kPromises) {
            if (p.device != device) continue;
            CAPTURE(device);
            CAPTURE(p.rows);
            CHECK(model.replay(model.answers(p.rows)).kernels == p.kernels);
        }
    }
}

TEST_CASE("launches: an answer step over packed caches has as many kernels as over BF16") {
    for (const char* kv : {"fp8", "nvfp4", "tq4", "k8v4"}) {
        PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon", .kv = kv}, cuda_stand_in::kH200);
        CAPTURE(std::string(kv));
        for (const int64_t rows : {1, 8}) CHECK(model.replay(model.answers(rows)).kernels == 203);
    }
}

/// Products add up over the ranks themselves.
TEST_CASE("launches: kernels of an answer step of the 35B on two ranks") {
    struct Promise {
        int64_t rows, one, two;
    };
    constexpr Promise kPromises[] = {{1, 203, 203}, {8, 203, 203}, {16, 283, 283}, {64, 283, 283}};
    for (const Promise& p : kPromises) {
        CAPTURE(p.rows);
        for (const int ranks : {1, 2}) {
            CAPTURE(ranks);
            PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon", .ranks = ranks},
                              cuda_stand_in::kH200);
            CHECK(model.replay(model.answers(p.rows)).kernels == (ranks == 1 ? p.one : p.two));
        }
    }
}

TEST_CASE("launches: sums of few rows go in packets, those of many in chunks") {
    for (const int ranks : {2, 4}) {
        PlacedModel model({.shape = "qwen3.6-27b-shape", .mix = "aeon", .ranks = ranks},
                          cuda_stand_in::kH200);
        const auto names = [&](const BatchShape& step) {
            std::vector<std::string> found;
            for (const Launch& l : model.launches(step))
                if (l.kernel->name.find("all_reduce") != std::string::npos ||
                    l.kernel->name.find("of_ranks") != std::string::npos)
                    found.push_back(l.kernel->name);
            return found;
        };
        CHECK(names(model.answers(64)) == std::vector<std::string>(128, "add_answer_of_ranks"));
        BatchShape prompt = model.prompt(65);
        CHECK(names(prompt) == std::vector<std::string>(128, "add_prompt_of_ranks<__nv_bfloat16, false>"));
        prompt.whole_residual = true;
        CHECK(names(prompt) == std::vector<std::string>(128, "add_prompt_of_ranks<__nv_bfloat16, true>"));
    }
}

TEST_CASE("launches: of prompts that a drafter reads every rank has the residual stream of all rows") {
    PlacedModel model({.shape = "qwen3.6-35b-a3b", .mix = "aeon", .mtp = true, .ranks = 2},
                      cuda_stand_in::kH200);
    const auto sums = [&](Pass pass) {
        BatchShape prompt = model.prompt(100);
        prompt.pass = pass;
        std::map<std::string, int> found;
        for (const Launch& l : model.launches(prompt))
            if (l.kernel->name.find("of_ranks") != std::string::npos) ++found[l.kernel->name];
        return found;
    };
    CHECK(sums(Pass::text) == std::map<std::string, int>{{"add_prompt_of_ranks<__nv_bfloat16, false>", 40},
                                                         {"add_prompt_terms_of_ranks<false, 8>", 40}});
    CHECK(sums(Pass::hidden) == std::map<std::string, int>{{"add_prompt_of_ranks<__nv_bfloat16, true>", 40},
                                                           {"add_prompt_terms_of_ranks<true, 8>", 40}});
}

}  // namespace
}  // namespace quern::test
