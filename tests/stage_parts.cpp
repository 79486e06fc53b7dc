// How layers are shared out among devices; what a group of stages does with addresses; the flags that choose them.
#include <doctest/doctest.h>

#include <cstring>

#include "ggml-like/error.h"
#include "models/layer_range.h"
#include "stage_models.h"
#include "tools/common/cli_args.h"
#include "tools/common/device_flags.h"
#include "tools/common/loading.h"
#include "tools/common/split_flags.h"

namespace quern {
namespace {

std::vector<int> counts(int layers, const std::vector<double>& shares, double before = 0, double after = 0) {
    const LayerSizes sizes{std::vector<double>(static_cast<size_t>(layers), 1), before, after};
    std::vector<int> list;
    int next = 0;
    for (const LayerRange& r : split_layers(sizes, shares)) {
        CHECK(r.begin == next);
        next = r.end;
        list.push_back(r.count());
    }
    CHECK(next == layers);
    return list;
}

DeviceChoice parse(const std::vector<std::string>& args) {
    DeviceChoice choice;
    ArgParser parser("test", "", "");
    add_device_flags(parser, choice);
    parser.apply(parser.normalise(args));
    return choice;
}

std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

/// On the CPU.
int stages_of(const std::vector<std::string>& args) {
    return make_backend(GpuOptions::none, 1, parse(args))->stages();
}

TEST_SUITE("cpu") {
    TEST_CASE("stage parts: layers in proportion, at least one each") {
        CHECK(counts(40, {3, 2}) == std::vector{24, 16});
        CHECK(counts(40, {1, 1}) == std::vector{20, 20});
        CHECK(counts(40, {0.6, 0.2, 0.2}) == std::vector{24, 8, 8});
        CHECK(counts(7, {1, 1}) == std::vector{4, 3});
        CHECK(counts(4, {1000, 1, 1}) == std::vector{2, 1, 1});
        CHECK(counts(4, {1, 1, 1000}) == std::vector{1, 1, 2});
        CHECK(counts(3, {1, 1, 1}) == std::vector{1, 1, 1});
        CHECK(counts(5, {7}) == std::vector{5});
        // An embedding as large as four layers on the first, a head on the last
        CHECK(counts(40, {1, 1}, 4, 0) == std::vector{18, 22});
        CHECK(counts(40, {1, 1}, 4, 4) == std::vector{20, 20});
        CHECK(error_of([] { counts(2, {1, 1, 1}); }).find("too few for 3 devices") != std::string::npos);
        CHECK(error_of([] { counts(2, {1, 0}); }).find("0 is no share of a model") != std::string::npos);
    }

    TEST_CASE("stage parts: what is at an address is done on its stage") {
        test::DeviceStages stages(3);
        Backend& group = *stages.group;
        constexpr int64_t kBytes = 1000;
        std::vector<std::byte*> memory;
        for (int s = 0; s < 3; ++s)
            memory.push_back(static_cast<std::byte*>(group.of_stage(s).alloc(kBytes, "test")));
        for (size_t s = 0; s < 3; ++s) CHECK(stages.each[s]->used == kBytes);
        std::vector<char> text(kBytes, 'a'), read(kBytes);
        for (std::byte* m : memory) group.upload(m, text.data(), kBytes);
        group.zero(memory[1] + 10, 5);
        group.download(read.data(), memory[1], kBytes);
        CHECK(read[9] == 'a');
        CHECK(read[10] == 0);
        CHECK(read[15] == 'a');
        group.copy(memory[1] + 500, memory[1] + 10, 5);
        group.download(read.data(), memory[1], kBytes);
        CHECK(read[500] == 0);
        CHECK(error_of([&] { group.copy(memory[0], memory[1], 5); }).find("from one stage to another") !=
              std::string::npos);
        CHECK(error_of([&] { group.zero(memory[2] + kBytes + 100000, 1); }) != "");

        auto* host = static_cast<std::byte*>(group.alloc_host(3 * kBytes, "test"));
        std::vector<BlockCopy> out, back;
        for (size_t s = 0; s < 3; ++s) {
            const auto at = static_cast<int64_t>(s) * kBytes;
            std::memset(memory[s], static_cast<int>('1' + s), kBytes);
            out.push_back({host + at, memory[s], kBytes, kBytes, kBytes, 1});
            back.push_back({memory[2 - s], host + at, kBytes, kBytes, kBytes, 1});
        }
        group.save(out);
        group.finish_saves();
        group.load(back);
        for (size_t s = 0; s < 3; ++s) {
            group.download(read.data(), memory[s], kBytes);
            CHECK(read == std::vector<char>(kBytes, static_cast<char>('3' - s)));
        }
        group.free_host(host);
        for (std::byte* m : memory) group.free(m);
        for (size_t s = 0; s < 3; ++s) CHECK(stages.each[s]->used == 0);
    }

    TEST_CASE("stage parts: a link that changes what it carries is found") {
        test::DeviceStages stages(3);
        CHECK(first_wrong_link(*stages.group, 1 << 16) == -1);
        stages.each[2]->after_receive = [](std::span<const BlockCopy> list) {
            list[0].to[777] ^= std::byte{1};
        };
        CHECK(first_wrong_link(*stages.group, 1 << 16) == 1);
        for (const test::CountedBackend* stage : stages.each) CHECK(stage->used == 0);
    }

    TEST_CASE("stage parts: -sm and -ts") {
        CHECK(!parse({}).by_layers);
        CHECK(!parse({"-sm", "none"}).by_layers);
        CHECK(parse({"--split-mode", "layer"}).by_layers);
        CHECK(parse({"-ts", "3,2"}).by_layers);
        CHECK(parse({"--tensor-split", "3/2/0.5"}).shares == std::vector<double>{3, 2, 0.5});
        CHECK(stages_of({"-ts", "3,2"}) == 2);
        CHECK(stages_of({"-sm", "layer", "-ts", "1,1,1"}) == 3);
        CHECK(stages_of({"-ts", "1"}) == 1);
        CHECK(error_of([] {
                  stages_of({"-sm", "layer"});
              }).find("with -ts, as in -ts 3,2") != std::string::npos);
        CHECK(error_of([] { parse({"-sm", "row"}); }).find("say -tp N instead") != std::string::npos);
        for (const char* wrong : {"", "3,", "a", "1,-1", "0,1", "1,nan", "1e99", "1 2"}) {
            CAPTURE(wrong);
            CHECK(error_of([&] { parse({"-ts", wrong}); }) != "");
        }
        CHECK(error_of([] { parse({"-sm", "layers"}); }).find("expected none or layer") != std::string::npos);
        const DeviceChoice both = parse({"-tp", "2", "-sm", "layer"});
        CHECK(error_of([&] { require_one_split(both); }).find("split one way") != std::string::npos);
    }
}

}  // namespace
}  // namespace quern
