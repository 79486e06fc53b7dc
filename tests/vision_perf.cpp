// Times of a full-size vision tower with random weights: a table of images, and of its ops for one of them.
#include <fmt/format.h>

#include <chrono>
#include <map>

#include "models/qwen3_6_vision.h"
#include "ops/harness.h"

namespace quern {
namespace {

using namespace test;

/// The tower of the 35B, on a device.
class Tower {
  public:
    explicit Tower(const Device& device) : device_(device) {
        c_ = {.width = 1152,
              .blocks = 27,
              .heads = 16,
              .mlp_width = 4304,
              .patch = 16,
              .frames = 2,
              .merge = 2,
              .side = 48,
              .out_width = 2048};
        w_.patches = biased("patches", 1152, 1536);
        w_.positions = vector({2304, 1152}, 0);
        w_.blocks.resize(27);
        for (size_t i = 0; i < w_.blocks.size(); ++i) {
            VisionBlockWeights& b = w_.blocks[i];
            b = {.norm1 = norm(), .norm2 = norm()};
            b.qkv = biased(fmt::format("qkv{}", i), 3456, 1152);
            b.proj = biased(fmt::format("proj{}", i), 1152, 1152);
            b.fc1 = biased(fmt::format("fc1{}", i), 4304, 1152);
            b.fc2 = biased(fmt::format("fc2{}", i), 1152, 4304);
        }
        w_.merger_norm = norm();
        w_.merger_fc1 = biased("merger_fc1", 4608, 4608);
        w_.merger_fc2 = biased("merger_fc2", 2048, 4608);
        device.backend->weights_complete();
    }

    /// Milliseconds for `images` of side x side pixels; `ops`: those of each op.
    double run(int64_t side, int64_t images, int times, std::map<std::string, double>* ops = nullptr) {
        const int64_t grid = side / 16, each = grid * grid;
        Backend& backend = *device_.backend;
        VisionGraph v =
            build_qwen3_6_vision(c_, w_, {.patches = images * each, .images = images}, device_.activation);
        const Tensor *pixels = v.patches, *place = v.place, *start = v.start, *out = v.features;
        Plan plan(std::move(v.graph), backend);
        for (int64_t i = 0; i < pixels->elements(); ++i)
            plan.input<uint8_t>(pixels)[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
        for (int64_t i = 0; i < images * each; ++i) {
            auto* at = plan.input<int32_t>(place) + 4 * i;
            at[0] = static_cast<int32_t>(i % each / grid), at[1] = static_cast<int32_t>(i % grid);
            at[2] = at[3] = static_cast<int32_t>(grid);
        }
        for (int64_t i = 0; i <= images; ++i) plan.input<int32_t>(start)[i] = static_cast<int32_t>(i * each);
        double best = 1e9;
        for (int i = 0; i < times; ++i) {
            const auto begun = std::chrono::steady_clock::now();
            plan.run();
            backend.synchronize();
            best = std::min(
                best,
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count());
        }
        float value = 0;
        backend.download(&value, out->data, sizeof value);
        CHECK(std::isfinite(value));
        if (ops == nullptr) return best;
        backend.after_node = [&](const Node& node, double seconds, const std::string&) {
            (*ops)[fmt::format("{} {}", node.op->name, node.name.substr(node.name.find('.') + 1))] +=
                1e3 * seconds;
        };
        plan.run();
        backend.synchronize();
        backend.after_node = nullptr;
        return best;
    }

  private:
    Tensor vector(std::initializer_list<int64_t> shape, float value) {
        return memory_.emplace_back(device_, "v", DType::F32, Place::weight, shape).tensor_with(value);
    }
    LayerNormWeights norm() { return {vector({1152}, 1), vector({1152}, 0)}; }
    BiasedWeight biased(const std::string& name, int64_t rows, int64_t cols) {
        const WeightSegment s{.name = name, .dtype = DType::BF16, .rows = rows, .cols = cols};
        return {placed(device_, Weight(name, {s})), vector({rows}, 0.01f)};
    }

    /// Guarded, filled with one value.
    struct Filled : Guarded {
        using Guarded::Guarded;
        Tensor tensor_with(float value) {
            fill(value);
            return tensor();
        }
    };

    const Device& device_;
    Qwen36VisionConfig c_;
    Qwen36VisionWeights w_;
    std::deque<Filled> memory_;
};

void print_ops(Tower& tower, int64_t side) {
    std::map<std::string, double> ops;
    tower.run(side, 1, 1, &ops);
    for (const auto& [name, time] : ops)
        if (time > 0.02) fmt::print("  {:32} {:7.3f} ms\n", name, time);
}

}  // namespace

TEST_SUITE("perf") {
    TEST_CASE("vision: times of a full-size tower (CUDA)") {
        const Device device = cuda_device();
        Tower tower(device);
        for (const auto& [side, images] :
             {std::pair<int64_t, int64_t>{512, 1}, {1024, 1}, {512, 16}, {2048, 1}, {4096, 1}})
            fmt::print("{:2} x {:4} x {:4}: {:8.2f} ms\n", images, side, side,
                       tower.run(side, images, side > 2000 ? 2 : 4));
        print_ops(tower, 1024);
    }
    TEST_CASE("vision: time of a full-size tower on the CPU") {
        const Device device = cpu_device();
        Tower tower(device);
        fmt::print("512 x 512 on the CPU: {:.0f} ms\n", tower.run(512, 1, 2));
        print_ops(tower, 512);
    }
}

}  // namespace quern
