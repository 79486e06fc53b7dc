#include "tools/common/device_flags.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "ggml-like/check.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/split_flags.h"

namespace quern {
namespace {

constexpr int kMaxRanks = 16;

std::vector<int> parse_devices(const std::string& text) {
    std::vector<int> list;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const int device =
            static_cast<int>(parse_integer(text.substr(begin, end - begin), "--device", 0, 1023));
        if (std::find(list.begin(), list.end(), device) != list.end())
            FAIL(usage, "--device {}: GPU {} is named twice", printable(text), device);
        list.push_back(device);
        begin = end + 1;
    }
    return list;
}

}  // namespace

std::vector<int> DeviceChoice::of_ranks() const {
    std::vector<int> list = devices;
    if (list.empty()) {
        list.resize(static_cast<size_t>(ranks));
        std::iota(list.begin(), list.end(), 0);
    }
    if (list.size() != static_cast<size_t>(ranks))
        FAIL(usage, "--device names {} GPU{}, and -tp asks for {}; name one for each rank", list.size(),
             list.size() == 1 ? "" : "s", ranks);
    return list;
}

void add_device_flags(ArgParser& parser, DeviceChoice& choice) {
    parser.value(
        "--device", "N[,N...]",
        "the GPU to use, from 0; with -tp one for each rank, with -sm layer all that share the layers",
        [&choice](const std::string& v) { choice.devices = parse_devices(v); });
    parser.value("-tp,--tensor-parallel-size", "N",
                 "run the model on N GPUs together, each with a part of every layer; on the CPU as N ranks; "
                 "default 1",
                 [&choice](const std::string& v) {
                     choice.ranks = static_cast<int>(parse_integer(v, "-tp", 1, kMaxRanks));
                 });
    parser.toggle("--no-peer-access",
                  "several GPUs send through host memory, not from one's memory to another's",
                  [&choice](bool) { choice.peer_access = false; });
    add_split_flags(parser, choice);
}

}  // namespace quern
