// Tiny checkpoints with the names, dtypes and configurations of published repositories, made by the scripts of
// ../shared/data/real-layouts; without that folder this test is skipped. scripts/verify_layouts.py compares their logits.
#include <doctest/doctest.h>

#include <filesystem>
#include <map>
#include <set>

#include "checkpoint_copy.h"

namespace quern {
namespace {

struct Report {
    int code = -1;
    std::string text;  // problems, and lines with "note" or "scheme"
};

/// What run.py and run_more.py print of each checkpoint: "##### NAME rc CODE", then what quantize-inspect said.
std::map<std::string, Report> reports(const std::string& scripts, const std::string& out) {
    std::map<std::string, Report> found;
    for (const char* script : {"run.py", "run_more.py"}) {
        const std::string command =
            fmt::format("python3 -B '{}/{}' '{}' '{}' 2>&1", scripts, script, out, QUERN_BINARY);
        std::FILE* pipe = popen(command.c_str(), "r");
        REQUIRE(pipe != nullptr);
        std::string name;
        char buffer[65536];
        while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) {
            const std::string line = buffer;
            const size_t code = line.find(" rc ");
            if (line.starts_with("##### ") && code != std::string::npos) {
                name = line.substr(6, code - 6);
                found[name] = {.code = std::stoi(line.substr(code + 4)), .text = ""};
            } else {
                found[name].text += line;
            }
        }
        CHECK(pclose(pipe) == 0);
    }
    return found;
}

}  // namespace

TEST_SUITE("model") {
    TEST_CASE("layouts: what is published is clean or refused for its true reason" *
              doctest::test_suite("slow")) {
        const std::string scripts = QUERN_SOURCE_DIR "/../shared/data/real-layouts";
        if (!std::filesystem::exists(scripts)) {
            MESSAGE("skipped: there is no " << scripts);
            return;
        }
        const test::TempDir out;
        const auto all = reports(scripts, out.str());
        CHECK(all.size() >= 36);
        const std::map<std::string, std::string> refused = {
            {"int4_awq", "an INT4 pack-quantized or GPTQ checkpoint, which quern does not read"},
            {"mxfp4_ct", "this is MXFP4, which quern does not read"},
            {"prequant", "an AWQ export of ModelOpt, whose activations would have to be scaled"}};
        // These have scales of zero, which no weights have: their layout is tests/weight_format.cpp's.
        const std::set<std::string> no_weights = {"fp8_f16scale"};
        for (const auto& [name, report] : all) {
            const auto& this_name = name;
            CAPTURE(this_name);
            const auto& this_report = report;
            CAPTURE(this_report.text);
            if (const auto reason = refused.find(name); reason != refused.end()) {
                CHECK(report.code == 3);
                CHECK(test::contains(report.text, reason->second));
            } else if (!no_weights.contains(name)) {
                CHECK(report.code == 0);
            }
        }
        // Official releases, and what their configurations say of all their tensors.
        for (const char* name :
             {"nvidia35", "nvidia35_mtpfp8", "nvidia27", "nvidia122_plainattn_kv", "qwenfp8", "qwenfp8_27",
              "redhat35", "redhat35_noindex", "reap_flat", "kat_stacked", "autoround_nvfp4", "autoround_fp8",
              "kv_q_scale", "gate_up_differ"}) {
            CAPTURE(name);
            REQUIRE(all.contains(name));
            CHECK(all.at(name).text.find("note") == std::string::npos);
        }
        for (const char* name : {"nvidia35", "nvidia27"}) CHECK(test::contains(all.at(name).text, "W4A16:"));
        CHECK(test::contains(all.at("nvidia122_plainattn_kv").text, "W4A4:"));
    }
}

}  // namespace quern
