// build/quern runs on machines that have none of the packages it was built with.
#include <doctest/doctest.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

namespace quern {
namespace {

/// The shared libraries that the program names itself (DT_NEEDED).
std::vector<std::string> needed_libraries() {
    std::FILE* pipe = popen("LC_ALL=C readelf -d '" QUERN_BINARY "'", "r");
    REQUIRE(pipe != nullptr);
    std::vector<std::string> names;
    std::array<char, 512> line;
    while (std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr) {
        const std::string text = line.data();
        const size_t open = text.find('['), close = text.find(']');
        if (text.find("(NEEDED)") != std::string::npos)
            names.push_back(text.substr(open + 1, close - open - 1));
    }
    CHECK(pclose(pipe) == 0);
    return names;
}

bool always_there(const std::string& library) {
    return library == "libc.so.6" || library == "libm.so.6" || library.starts_with("ld-linux");
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("quern needs no library but libc and libm") {
        const std::vector<std::string> names = needed_libraries();
        CHECK(!names.empty());
        for (const std::string& name : names) {
            CAPTURE(name);
            CHECK(always_there(name));
        }
    }
}

}  // namespace quern
