#include "tools/bench/watched.h"

#include <chrono>
#include <future>

#include "ggml-like/backend.h"
#include "tools/bench/gpu_state.h"

namespace quern {

Samples run_watched(Engine& engine, const BenchTest& test, int repetitions, ReplayDrafter* drafter,
                    std::string& taint) {
    const std::string bus_id = engine.backend().bus_id();
    if (bus_id.empty()) return run_test(engine, test, repetitions, drafter);
    std::future<std::string> look;
    const Samples samples = run_test(engine, test, repetitions, drafter, [&] {
        if (!look.valid()) look = std::async(std::launch::async, [&] { return gpu_taint(bus_id); });
        return look.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
    });
    taint = look.get();
    return samples;
}

}  // namespace quern
