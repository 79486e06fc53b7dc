// quantize-inspect --write: no kill, thread or repetition changes a byte, and nothing that is there is
// harmed.
#include "write_harness.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr int64_t kSmallFile = 1'000'000;

std::vector<std::string> in_small_files(const std::string& out) {
    return {QUERN_BINARY, "quantize-inspect", "-m",    demo_bf16(), "--write", out, "--recipe",
            "aeon",       "--shard-size",     "0.001", "-t",        "2"};
}

std::map<std::string, std::string> whole_result(const std::string& directory) {
    write(demo_bf16(), {.directory = directory, .recipe = "aeon", .shard_bytes = kSmallFile, .threads = 2});
    return contents(directory);
}

/// The wait status of a process that got SIGKILL after `milliseconds`, unless it had ended.
int killed_after(int milliseconds, const std::vector<std::string>& command) {
    const pid_t pid = start(command);
    int status = 0;
    for (int waited = 0; waited < milliseconds; ++waited) {
        if (waitpid(pid, &status, WNOHANG) == pid) return status;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(pid, SIGKILL);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    return status;
}

/// A file whose checksum was noted; empty: none yet.
std::string first_finished(const std::string& out) {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(out + ".partial", none))
        if (entry.path().extension() == ".sum") return out + ".partial/files/" + entry.path().stem().string();
    return {};
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("write: the same bytes from run to run, on any number of threads, in any number of files") {
        const TempDir dir;
        std::optional<std::map<std::string, std::string>> first;
        for (const int threads : {1, 2, 7}) {
            const std::string out = dir / fmt::format("out{}", threads);
            write(demo_bf16(),
                  {.directory = out, .recipe = "fp8-head", .shard_bytes = 3'000'000, .threads = threads});
            const auto now = contents(out);
            CHECK(now.size() > 8);
            CHECK(now.contains("model.safetensors.index.json"));
            CHECK(now.contains("tokenizer.json"));
            CHECK(now.contains("chat_template.jinja"));
            if (!first) first = now;
            CHECK(now == *first);
        }
        write(demo_bf16(), {.directory = dir / "one", .recipe = "fp8-head", .threads = 2});
        CHECK(contents(dir / "one").contains("model.safetensors"));
        for (const ModuleComparison& m : against(dir / "one", dir / "out1").modules)
            CHECK(m.error.different == 0);
    }

    TEST_CASE(
        "write: killed at any moment, it is absent, continuable or complete, and ends in the same bytes") {
        const TempDir dir;
        const std::string out = dir / "out", partial = out + ".partial";
        const auto expected = whole_result(dir / "expected");
        int kills = 0;
        bool complete = false;
        for (int delay = 5; !complete && delay < 100000; delay = delay * 5 / 4 + 1) {
            const int status = killed_after(delay, in_small_files(out));
            kills += WIFSIGNALED(status);
            if (fs::exists(out)) CHECK(Inspection(out, ReadMode::values).clean());
            // Also when the kill came between the last step and the exit.
            complete = fs::exists(out) && !fs::exists(partial);
            if (WIFEXITED(status)) {
                REQUIRE(WEXITSTATUS(status) == 0);
                REQUIRE(complete);
            }
        }
        MESSAGE(kills << " kills");
        CHECK(kills >= 5);
        CHECK(complete);
        CHECK(contents(out) == expected);
    }

    TEST_CASE("write: a finished file that is damaged before the work goes on is made again") {
        const TempDir dir;
        const std::string out = dir / "out";
        const auto expected = whole_result(dir / "expected");
        const pid_t pid = start(in_small_files(out));
        std::string finished;
        int status = 0;
        while (finished.empty() && waitpid(pid, &status, WNOHANG) == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            finished = first_finished(out);
        }
        kill(pid, SIGKILL);
        REQUIRE(waitpid(pid, &status, 0) == pid);
        REQUIRE(WIFSIGNALED(status));
        {
            std::fstream file(finished, std::ios::in | std::ios::out | std::ios::binary);
            file.seekp(-7, std::ios::end);
            file.put('\x5a');
            REQUIRE(file.good());
        }
        REQUIRE(waitpid(start(in_small_files(out)), &status, 0) > 0);
        CHECK(WEXITSTATUS(status) == 0);
        CHECK(contents(out) == expected);
    }

    TEST_CASE("write: an end that was interrupted is ended, by the same command only") {
        const TempDir dir;
        const std::string source = parity("base/bf16"), out = dir / "out", partial = out + ".partial";
        const auto again = [&](const std::string& recipe) {
            return usage_error([&] { write(source, {.directory = out, .recipe = recipe}); });
        };
        write(source, {.directory = out, .recipe = "aeon"});
        fs::create_directory(partial);
        CHECK(again("aeon") == "<no error>");
        CHECK(!fs::exists(partial));
        dir.write("out.partial/job", "another\n");
        CHECK(contains(again("aeon"), "it exists already"));
        CHECK(Inspection(out, ReadMode::values).clean());
    }

    TEST_CASE("write: folders of drafters come along, others are named") {
        const TempDir dir;
        const std::string source = dir / "source", out = dir / "out";
        fs::copy(source_dir() + "/models/demo", source, fs::copy_options::recursive);
        fs::create_directory(source + "/thoughts");
        dir.write("source/thoughts/first.txt", "none of a checkpoint's");
        const WriteReport report = write(source, {.directory = out, .recipe = "xs", .threads = 2});
        const auto now = contents(out);
        int copied = 0;
        for (const auto& file : contents(source)) {
            const std::string& name = file.first;
            if (!name.starts_with("mtp/") && !name.starts_with("dflash/")) continue;
            CAPTURE(name);
            REQUIRE(now.contains(name));
            CHECK(now.at(name) == file.second);
            ++copied;
        }
        CHECK(copied >= 3);
        CHECK(!now.contains("thoughts/first.txt"));
        CHECK(std::count(report.notes.begin(), report.notes.end(), "thoughts: not copied, a folder") == 1);
    }

    TEST_CASE("write: what is there already, what is the source, and what was begun otherwise are refused") {
        const TempDir dir;
        const std::string source = parity("base/bf16"), out = dir / "out";
        const auto error = [&](const WriteOptions& options) {
            return usage_error([&] { write(source, options); });
        };
        CHECK(contains(error({.directory = source, .recipe = "aeon"}), "that is the source itself"));
        CHECK(contains(error({.directory = source + "/../bf16/", .recipe = "aeon"}),
                       "that is the source itself"));
        CHECK(contains(error({.directory = dir / "no/where", .recipe = "aeon"}), "is no directory"));
        fs::create_directory(out);
        CHECK(contains(error({.directory = out, .recipe = "aeon"}), "it exists already"));
        fs::remove(out);
        dir.write("out.partial/precious.txt", "mine");
        CHECK(
            contains(error({.directory = out, .recipe = "aeon"}), "was not left by an interrupted --write"));
        CHECK(fs::exists(out + ".partial/precious.txt"));
        fs::remove_all(out + ".partial");
        dir.write("out.partial/job", "another job\n");
        dir.write("out.partial/lock", "");
        CHECK(contains(error({.directory = out, .recipe = "aeon"}),
                       "another source, recipe, format or version"));
        fs::remove_all(out + ".partial");
        write(source, {.directory = out, .recipe = "aeon"});
        CHECK(contains(error({.directory = out, .recipe = "aeon"}), "it exists already"));
        CHECK(contains(usage_error([&] {
                           write(out, {.directory = dir / "b",
                                       .recipe = "xs",
                                       .format = CheckpointFormat::compressed_tensors});
                       }),
                       "<no error>"));  // NVFP4 stays, the DeltaNet is added
        CHECK(contains(usage_error([&] { write(out, {.directory = dir / "c"}); }), "nothing to write"));
        const std::string fp8 = dir.write("fp8.json", R"({"roles": {"experts": "fp8"}})");
        CHECK(contains(usage_error([&] { write(out, {.directory = dir / "c", .recipe = fp8}); }),
                       "start from the BF16 original"));
    }

    TEST_CASE(
        "write: weights that are no numbers are refused, and a full disk leaves a run that can be "
        "continued") {
        CheckpointCopy copy("base/bf16");
        std::string& data = copy.weights.at("model.language_model.layers.3.mlp.experts.down_proj").data;
        data[data.size() / 2 + 1] = '\x7f';
        data[data.size() / 2] = '\xc0';
        copy.write();
        const TempDir dir;
        const std::string message =
            test::model_error([&] { write(copy.dir.str(), {.directory = dir / "out", .recipe = "aeon"}); });
        CHECK(contains(message, "down_proj: a weight is NaN or infinite"));
        CHECK(!fs::exists(dir / "out"));

        const std::string big = dir / "big";
        const std::string command = "-m " + demo_bf16() + " --shard-size 0.004 --write " + big;
        std::string text;  // files of at most 1 MB stand for the full disk
        std::FILE* pipe = popen(
            ("trap '' XFSZ; ulimit -f 2000; " QUERN_BINARY " quantize-inspect " + command + " 2>&1").c_str(),
            "r");
        REQUIRE(pipe != nullptr);
        char buffer[4096];
        while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
        const int status = pclose(pipe);
        CHECK(WEXITSTATUS(status) == 1);
        CHECK_MESSAGE(contains(text, "cannot write"), text);
        CHECK(!fs::exists(big));
        CHECK(inspect_exit_code(command) == 0);
        CHECK(Inspection(big, ReadMode::values).clean());
    }

    TEST_CASE("write: from one process at a time, with the exit codes of the others") {
        const TempDir dir;
        const std::string out = dir / "out";
        std::string text;
        CHECK(inspect_exit_code("-m " + parity("base/bf16") + " --write " + out, &text) == 0);
        CHECK(contains(text, "matrices quantized"));
        CHECK(inspect_exit_code("-m " + out + " --audit") == 0);
        CHECK(inspect_exit_code("-m " + out + " --against " + parity("base/bf16")) == 0);
        CHECK(inspect_exit_code("-m " + out + " --against " + parity("deep/bf16")) == 3);
        CHECK(inspect_exit_code("-m " + out + " --write " + out) == 2);
        CHECK(inspect_exit_code("-m " + out + " --write " + dir.str() + "/x --format gguf") == 2);
        CHECK(inspect_exit_code("-m " + dir.str() + "/nothing --write " + dir.str() + "/x") == 3);
        text.clear();
        CHECK(inspect_exit_code("-m " + out + " --against " + parity("base/bf16") + " --json", &text) == 0);
        const nlohmann::json j = nlohmann::json::parse(text);
        CHECK(j["clean"] == true);
        CHECK(j["roles"]["experts"]["snr_db"] > 18);
        CHECK(j["matrices"].size() > 100);
        CHECK(j["matrices"][0]["relative_rms"] >= j["matrices"][5]["relative_rms"]);
    }
}
