// Cases of the suite "cuda" fail where there is no GPU. A run that does not ask for that suite leaves it out there.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <string>

#include "ggml-like/cuda_backend.h"

namespace {

/// Whether a flag like -ts=cuda or --test-suite=cuda,perf names the suite.
bool asks_for_cuda(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        const size_t equals = flag.find('=');
        if (equals == std::string::npos || flag.find("cuda", equals) == std::string::npos) continue;
        const std::string name = flag.substr(0, equals);
        if (name.ends_with("-ts") || name.ends_with("-test-suite")) return true;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    if (!asks_for_cuda(argc, argv)) {
        const std::string reason = quern::cuda_unavailable(0);
        if (!reason.empty()) {
            std::fprintf(stderr, "without the suite cuda: %s\n", reason.c_str());
            context.addFilter("test-suite-exclude", "cuda");
        }
    }
    return context.run();
}
