// Cases of the suite "cuda" fail where there is no GPU, those of "gpus" where there are not two. A run that does not ask for such a
// suite leaves it out there.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <string>
#include <utility>

#include "ggml-like/cuda_backend.h"

namespace {

/// Whether a flag like -ts=cuda or --test-suite=cuda,perf names the suite.
bool asks_for(const std::string& suite, int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        const size_t equals = flag.find('=');
        if (equals == std::string::npos || flag.find(suite, equals) == std::string::npos) continue;
        const std::string name = flag.substr(0, equals);
        if (name.ends_with("-ts") || name.ends_with("-test-suite")) return true;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    std::string left_out;
    for (const auto& [suite, device] : {std::pair("cuda", 0), {"gpus", 1}}) {
        if (asks_for(suite, argc, argv)) continue;
        const std::string reason = quern::cuda_unavailable(device);
        if (reason.empty()) continue;
        if (device == 0) std::fprintf(stderr, "without the suite %s: %s\n", suite, reason.c_str());
        left_out += (left_out.empty() ? "" : ",") + std::string(suite);
    }
    if (!left_out.empty()) context.addFilter("test-suite-exclude", left_out.c_str());
    return context.run();
}
