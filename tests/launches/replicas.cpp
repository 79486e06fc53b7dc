// Replicas on cards of their own that share states in host memory, each driven by a thread: every call is one that CUDA takes.
#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "models/weight_placement.h"
#include "tools/common/load_replicas.h"
#include "tools/engine/engine.h"
#include "tools/engine/kept_states.h"

namespace quern {
namespace {

using cuda_stand_in::kA100, cuda_stand_in::kH200;

struct Replica {
    Replica(int device, std::shared_ptr<KeptStates> kept) : backend(make_cuda_backend(device)) {
        model = open_synthetic("tiny", "aeon", {.tokenizer = false});
        place_weights(*model, *backend);
        engine = std::make_unique<Engine>(*model, *backend,
                                          EngineOptions{.context = 512,
                                                        .sequences = 2,
                                                        .cache_bytes = 64 << 20,
                                                        .kept = std::move(kept),
                                                        .sharing = 2});
    }
    /// Runs a prompt and its answer on a thread of its own; tokens that were cached.
    int64_t answer(std::vector<int32_t> prompt) {
        Result result;
        std::thread thread([&] {
            backend->use_on_this_thread();
            Request r{.prompt = std::move(prompt)};
            r.sampling.temperature = 0;
            r.max_tokens = 5;
            result = engine->run(std::move(r));
            engine->settle_states();
        });
        thread.join();
        CHECK(result.error == "");
        CHECK(result.tokens.size() == 5);
        return result.cached_tokens;
    }

    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
    std::unique_ptr<Engine> engine;
};

TEST_CASE("replicas: one goes on from what another card's engine has left") {
    Replica first(kH200, nullptr), second(kA100, first.engine->kept_states());
    CHECK(first.answer(std::vector<int32_t>(300, 5)) == 0);
    CHECK(second.answer(std::vector<int32_t>(310, 5)) == 256);
    CHECK(second.answer(std::vector<int32_t>(400, 5)) == 256);
    CHECK(first.answer(std::vector<int32_t>(410, 5)) == 384);
    std::thread other([&] {  // both at once
        second.backend->use_on_this_thread();
        for (int i = 0; i < 3; ++i) second.answer(std::vector<int32_t>(300 + 10 * i, 6));
    });
    for (int i = 0; i < 3; ++i) first.answer(std::vector<int32_t>(300 + 10 * i, 7));
    other.join();
    second.engine.reset();
    first.engine.reset();
    cuda_stand_in::take_record();
}

TEST_CASE("replicas: cards of different kinds, and missing ones, are refused by name") {
    const auto refused = [](std::vector<int> gpus) {
        LoadOptions load{.synthetic = "tiny", .mix = "aeon", .gpu = GpuOptions::all};
        load.devices.devices = std::move(gpus);
        try {
            load_replicas(load, 2);
        } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::device);
            return std::string(error.what());
        }
        return std::string();
    };
    const std::string kinds = refused({kH200, kA100}), missing = refused({kH200, 99});
    for (const char* part : {"GPUs of one kind", "H200", "A100"})
        CHECK(kinds.find(part) != std::string::npos);
    CHECK(missing.find("--data-parallel 2 needs 2 GPUs, but there is no GPU 99") != std::string::npos);
}

}  // namespace
}  // namespace quern
