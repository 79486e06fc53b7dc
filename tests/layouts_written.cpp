// Layouts that no engine but this one reads are written as those that all read.
#include <doctest/doctest.h>

#include <algorithm>

#include "models/checkpoint.h"
#include "stacked_experts.h"

namespace quern {
namespace {

using test::CheckpointCopy;
using test::contains;
using test::SafetensorsWriter;
using namespace test::stacked;

/// Whether two directories have the same tensors, to the last byte, whatever their order.
bool same_tensors(const std::string& a, const std::string& b) {
    const Checkpoint one = Checkpoint::open(a), other = Checkpoint::open(b);
    if (one.tensors().size() != other.tensors().size()) return false;
    return std::all_of(one.tensors().begin(), one.tensors().end(), [&](const CheckpointTensor& t) {
        const uint32_t at = other.find(t.name);
        if (at == Checkpoint::kNone) return false;
        const SafeTensor& same = *other.tensors()[at].tensor;
        return describe(same) == describe(*t.tensor) &&
               std::equal(t.tensor->data, t.tensor->data + t.tensor->bytes(), same.data);
    });
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("layouts: quantized experts in a stack are written as modules of their own") {
        const auto compare = [](const CheckpointCopy& single, const CheckpointCopy& stacked,
                                const std::string& options) {
            CAPTURE(options);
            const auto write = [&](const CheckpointCopy& c) {
                c.write();
                std::string said;
                const int code = test::inspect_exit_code(
                    "--write " + c.dir / "new --format " + options + " " + c.dir.str(), &said);
                CAPTURE(said);
                CHECK(code == 0);
                return c.dir / "new";
            };
            const std::string a = write(single), b = write(stacked);
            CHECK(same_tensors(a, b));
            const bool same_config =
                test::read_json(a + "/config.json") == test::read_json(b + "/config.json");
            CHECK(same_config);
            CHECK(test::inspect_exit_code("--audit " + b) == 0);
        };
        for (const bool one_global : {false, true}) {
            CheckpointCopy single("base/ct"), stacked("base/ct");
            for (auto* w : {&single.weights, &stacked.weights})
                for (int layer = 0; layer < kLayers; ++layer) {
                    level(*w, layer, ".input_global_scale", false);
                    level(*w, layer, ".weight_global_scale", one_global);
                }
            stack(stacked.weights, one_global);
            if (one_global)
                std::erase_if(single.weights.entries, [](const auto& e) {
                    return contains(e.name, ".experts.") && contains(e.name, "input_global_scale");
                });
            compare(single, stacked, "modelopt");
        }
        CheckpointCopy single("real_heads/fp8_block"), stacked("real_heads/fp8_block");
        stack_fp8(single.weights, false);
        stack_fp8(stacked.weights, true);
        compare(single, stacked, "compressed-tensors");
    }
}

}  // namespace quern
