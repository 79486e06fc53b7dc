// Loops on many threads, and the table of names.
#include "ggml-like/parallel.h"

#include <doctest/doctest.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "ggml-like/name_hash.h"

using namespace quern;

TEST_SUITE("cpu") {
    TEST_CASE("parallel: every element once, on any number of threads") {
        for (const int threads : {0, 1, 3, 8}) {
            for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{1000}}) {
                std::vector<std::atomic<int>> seen(count);
                for_each_parallel(threads, count, [&](size_t i) { ++seen[i]; });
                bool once = true;
                for (const auto& n : seen) once = once && n == 1;
                CHECK(once);
            }
        }
    }

    TEST_CASE("parallel: the error is the one that a plain loop would meet, even when others are faster") {
        for (const int threads : {1, 2, 8}) {
            for (int repeat = 0; repeat < 20; ++repeat) {
                std::string told;
                try {
                    for_each_parallel(threads, 100, [&](size_t i) {
                        if (i < 3) return;
                        if (i == 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                        throw std::runtime_error(std::to_string(i));
                    });
                } catch (const std::runtime_error& error) {
                    told = error.what();
                }
                CHECK(told == "3");
            }
        }
    }

    TEST_CASE("name map: finds what was added, keeps the first of two, remembers the order") {
        NameMap map;
        CHECK(map.find("") == nullptr);
        std::vector<std::string> names = {""};
        for (int i = 0; i < 5000; ++i) names.push_back("layers." + std::to_string(i) + ".weight");
        for (size_t i = 0; i < names.size(); ++i) {
            if (i == 1000) map.reserve(3000);
            CHECK(map.find(names[i]) == nullptr);
            CHECK(map.emplace(names[i], static_cast<uint32_t>(i)) ==
                  std::pair(static_cast<uint32_t>(i), true));
        }
        CHECK(map.size() == names.size());
        CHECK(map.emplace(names[7], 99) == std::pair(7u, false));
        CHECK(map.find("layers.5000.weight") == nullptr);
        size_t next = 0;
        map.for_each([&](std::string_view name, uint32_t value) {
            CHECK(name == names[next]);
            CHECK(value == next++);
        });
        CHECK(next == names.size());
        for (uint32_t i = 0; i < names.size(); ++i) {
            const uint32_t* found = map.find(names[i]);
            REQUIRE(found != nullptr);
            CHECK(*found == i);
        }
        names.push_back("layers.5000.weight");  // not there
        uint32_t asked = 3;
        map.find_each(
            3, names.size(), [&](size_t i) { return std::string_view(names[i]); },
            [&](size_t i, const uint32_t* found) {
                CHECK(i == asked++);
                CHECK((found ? *found : ~0u) == (i == 5001 ? ~0u : i));
            });
        CHECK(asked == names.size());
        NameMap().find_each(
            0, 2, [](size_t) { return std::string_view("a"); },
            [&](size_t, const uint32_t* found) { asked += found == nullptr; });
        CHECK(asked == names.size() + 2);
        const NameMap moved = std::move(map);
        CHECK(*moved.find(names[42]) == 42);
    }
}
