// The real binary, as a shell would start it: exit codes, what goes to stdout, and token ids in and out.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "checkpoint_writer.h"
#include "ggml-like/json.h"

#include <doctest/doctest.h>

namespace quern {
namespace {

struct Outcome {
    int code;
    std::string out;
};

Outcome shell(const std::string& command) {
    std::FILE* pipe = popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::string out;
    std::array<char, 4096> buffer;
    while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), n);
    const int status = pclose(pipe);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, out};
}

const std::string kQuern = QUERN_BINARY;

TEST_SUITE("model") {
    TEST_CASE("run: stdout is the answer and one newline") {
        const Outcome o =
            shell(kQuern + " run -p 'What is the capital of France?' --temp 0 2>/dev/null </dev/null");
        CHECK(o.code == 0);
        CHECK(o.out == "The capital of France is Paris.\n");
        CHECK(shell("echo 'What is the capital of France?' | " + kQuern + " run --temp 0 2>/dev/null").out ==
              o.out);
        const Outcome json = shell(kQuern + " run -p hello --format json 2>/dev/null </dev/null");
        CHECK(json.code == 0);
        CHECK(json.out.find("\"finish_reason\":\"stop\"") != std::string::npos);
    }

    TEST_CASE("run -cnv: each line of a pipe is a message or a command") {
        const Outcome o = shell(
            "printf 'What is 48 + 37?\\n/nothink\\nWhat is the capital of France?\\n/bye\\nWhat is 1 + "
            "1?\\n' | " +
            kQuern + " run -cnv --temp 0 2>/dev/null");
        CHECK(o.code == 0);
        CHECK(o.out == "48 + 37 = 85.\nThe capital of France is Paris.\n");
    }

    TEST_CASE("run --json-schema and --grammar: the answer has the form that was asked for") {
        const test::TempDir dir;
        const std::string schema =
            R"({"type":"object","properties":{"sum":{"type":"integer","minimum":3,"maximum":400}},"required":["sum"],"not":{}})";
        std::ofstream(dir / "schema.json") << schema;
        std::ofstream(dir / "grammar.gbnf") << "root ::= \"yes \" [0-9]{2} | \"no\"";
        const std::string ask = kQuern + " run -p 'What is 48 + 37?' --temp 0 --reasoning off ";
        for (const std::string& given : {"'" + schema + "'", dir / "schema.json"}) {
            const Outcome o = shell(ask + "--json-schema " + given + " 2>&1 </dev/null");
            CHECK(o.code == 0);
            CHECK(o.out.find("$.not is not enforced") != std::string::npos);
            const auto answer = nlohmann::json::parse(o.out.substr(o.out.find('{')));
            CHECK(answer.size() == 1);
            CHECK(answer["sum"].get<int>() >= 3);
            CHECK(answer["sum"].get<int>() <= 400);
        }
        const Outcome text = shell(ask + "--grammar " + (dir / "grammar.gbnf") + " 2>/dev/null </dev/null");
        CHECK(text.code == 0);
        CHECK(shell(ask + "--format json --grammar " + (dir / "grammar.gbnf") + " 2>/dev/null </dev/null")
                  .out.find("\"finish_reason\":\"stop\"") != std::string::npos);
        CHECK((text.out == "no\n" || (text.out.size() == 7 && text.out.starts_with("yes "))));
        CHECK(shell(ask + "--json-schema '{\"type\":\"text\"}' 2>&1 </dev/null").code == 2);
        CHECK(shell(ask + "--json-schema /nowhere 2>&1 </dev/null").code == 2);
        CHECK(shell(ask + "--grammar " + (dir / "grammar.gbnf") + " -j '{}' 2>&1 </dev/null").code == 2);
    }

    TEST_CASE("run --tool-cmd: without a terminal, only with --tool-yes; its faults are the tool's result") {
        const std::string tools = " run -p 'What is the weather in Paris?' --temp 0 --tools " QUERN_SOURCE_DIR
                                  "/tests/vectors/cli/tools.json --tool-cmd ";
        const Outcome yes =
            shell(kQuern + tools +
                  QUERN_SOURCE_DIR "/tests/vectors/cli/weather.sh --tool-yes 2>/dev/null </dev/null");
        CHECK(yes.code == 0);
        CHECK(yes.out.find("In Paris it is 17") != std::string::npos);
        const Outcome no =
            shell(kQuern + tools + QUERN_SOURCE_DIR "/tests/vectors/cli/weather.sh 2>&1 </dev/null");
        CHECK(no.code == 0);
        CHECK(no.out.find("In Paris it is 17") == std::string::npos);
        CHECK(no.out.find("--tool-yes") != std::string::npos);
        CHECK(shell(kQuern + tools + "false --tool-yes 2>/dev/null </dev/null").code == 0);
        CHECK(shell(kQuern + tools + "/no/such/program 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run -p x --tool-cmd cat 2>/dev/null </dev/null").code == 2);
    }

    TEST_CASE("bench: nothing to measure is an error") {
        const Outcome o = shell(kQuern + " bench -p 0 -n 0 2>&1");
        CHECK(o.code == 2);
        CHECK(o.out.find("-p N") != std::string::npos);
    }

    TEST_CASE("run, bench: random weights of the dense family") {
        for (const char* mix : {"aeon", "fp8-head", "xs", "nvidia", "qwen-fp8"}) {
            CAPTURE(mix);
            const std::string flags = std::string(" --synthetic tiny-dense -ngl 0 --mix ") + mix;
            CHECK(shell(kQuern + " run -p hello -n 4" + flags + " 2>/dev/null </dev/null").code == 0);
            const Outcome bench = shell(kQuern + " bench -p 8 -n 4" + flags + " 2>/dev/null </dev/null");
            CHECK(bench.code == 0);
            CHECK(bench.out.find("| qwen3_5 ") != std::string::npos);
            CHECK(bench.out.find("| MLP |") != std::string::npos);
            const std::string experts = std::string(" run -p hi -n 2 --synthetic tiny -ngl 0 --mix ") + mix;
            CHECK(shell(kQuern + experts + " 2>/dev/null </dev/null").code == 0);
        }
        CHECK(shell(kQuern + " run --synthetic tiny-dens -p hi 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run --synthetic tiny DIR -p hi 2>/dev/null </dev/null").code == 2);
    }

    TEST_CASE("what was asked for and cannot be written is an error") {
        for (const char* what : {"--help", "--version", "run --help", "serve --version", "bench --help",
                                 "quantize-inspect --help", "serve --print-config codex"}) {
            CAPTURE(what);
            const Outcome o = shell(kQuern + " " + what + " 2>&1 >/dev/full");
            CHECK(o.code == 1);
            CHECK(o.out == "quern: error: cannot write to standard output: No space left on device\n");
            CHECK(shell(kQuern + " " + what + " 2>/dev/null >&-").code == 1);
        }
    }

    TEST_CASE("errors name flags as they were typed, or set in the environment") {
        const auto says = [&](const std::string& command, const std::string& before = "") {
            const Outcome o = shell(before + " " + kQuern + " " + command + " 2>&1 </dev/null");
            CHECK(o.code == 2);
            const std::string head = "quern: error: ";
            return o.out.substr(0, o.out.find(':', head.size()) + 1);
        };
        for (const char* flag : {"-tp",
                                 "--tensor-parallel-size",
                                 "-t",
                                 "--threads",
                                 "-cram",
                                 "--cache-ram",
                                 "-ub",
                                 "--ubatch-size",
                                 "-c",
                                 "--ctx-size",
                                 "-ts",
                                 "--tensor-split",
                                 "-sm",
                                 "--split-mode",
                                 "-ctk",
                                 "--cache-type-k",
                                 "-n",
                                 "--n-predict",
                                 "--temperature",
                                 "--draft-n"})
            for (const char* program : {"run", "serve"}) {
                CAPTURE(flag);
                const std::string name(flag), error = "quern: error: " + name + ":";
                CHECK(says(std::string(program) + " " + name + " x") == error);
                CHECK(says(std::string(program) + " " + name + "=x") == error);
            }
        CHECK(says("run -c 4k --ctx-size x") == "quern: error: --ctx-size:");
        CHECK(says("run -p hi", "QUERN_ARG_CTX_SIZE=x") == "quern: error: QUERN_ARG_CTX_SIZE:");
        CHECK(says("run -c x", "QUERN_ARG_CTX_SIZE=4k") == "quern: error: -c:");
        CHECK(says("bench --n-prompt x") == "quern: error: --n-prompt:");
        const Outcome two =
            shell(kQuern + " run --split-mode layer --tensor-parallel-size 2 2>&1 </dev/null");
        CHECK(two.code == 2);
        CHECK(two.out.find("--split-mode layer and --tensor-parallel-size 2: ") != std::string::npos);
        const Outcome path = shell(kQuern + " run --ctx-size 1k -m '/tmp/no -c model' -p x 2>&1 </dev/null");
        CHECK(path.out.find("'/tmp/no -c model'") != std::string::npos);
        const Outcome quoted = shell(kQuern + " run --ctx-size '-c' 2>&1 </dev/null");
        CHECK(quoted.out.find("found '-c'") != std::string::npos);  // a value stays as it is
    }

    TEST_CASE("flags: limits and possible values are told") {
        const auto says = [&](const std::string& command) {
            const Outcome o = shell(kQuern + " " + command + " 2>&1 </dev/null");
            CHECK(o.code == 2);
            return o.out;
        };
        CHECK(says("run -n 99999999999999999999").find("from -1 to 9223372036854775807") !=
              std::string::npos);
        CHECK(says("run -n -2").find("of at least -1") != std::string::npos);
        const std::string alias = says("serve --alias a:tmp=1");
        CHECK(alias.find("--alias a: there is no setting 'tmp'; did you mean 'temp'?") != std::string::npos);
        CHECK(alias.find("top_p") != std::string::npos);
        CHECK(says("serve --alias a:foo=1").find("reasoning_budget") != std::string::npos);
    }

    TEST_CASE("serve --cache-dir: a directory that is none is a wrong command line") {
        const test::TempDir dir;
        dir.write("file", "x");
        for (const char* path : {"file", "file/below"}) {
            const Outcome o = shell("timeout 60 " + kQuern + " serve -ngl 0 --port 0 --cache-dir " +
                                    (dir / path) + " 2>&1 </dev/null");
            CHECK(o.code == 2);
            CHECK(o.out.find("--cache-dir " + (dir / path)) != std::string::npos);
        }
        const Outcome o =
            shell("timeout 60 " + kQuern + " serve -ngl 0 --port 0 --cache-dir /proc 2>&1 </dev/null");
        CHECK(o.code == 2);  // for root, too
    }

    TEST_CASE("a cut-off or empty file of a checkpoint: what to do") {
        for (const char* file : {"config.json", "tokenizer.json"})
            for (const bool empty : {false, true}) {
                CAPTURE(file);
                const test::TempDir dir;
                shell("cp -r " QUERN_SOURCE_DIR "/models/demo/. " + dir.str());
                if (empty)
                    std::ofstream(dir / file) << "{}";
                else
                    std::filesystem::resize_file(dir / file, std::filesystem::file_size(dir / file) / 2);
                const Outcome o = shell(kQuern + " run -ngl 0 -p hi " + dir.str() + " 2>&1 </dev/null");
                CHECK(o.code == 3);
                CHECK(o.out.find(file) != std::string::npos);
                CHECK(o.out.find("ownload it again") != std::string::npos);
            }
    }

    TEST_CASE("errors of several lines are printed as such") {
        const Outcome o = shell(kQuern + " run -m /no/such -p hi -ngl 0 2>&1 </dev/null");
        CHECK(o.code == 3);
        CHECK(o.out.find("error: no checkpoint found for '/no/such'. Tried:\n  /no/such (not there") !=
              std::string::npos);
        CHECK(o.out.find("\n  Give a checkpoint directory") != std::string::npos);
    }

    TEST_CASE("run: exit codes") {
        CHECK(shell(kQuern + " run --no-such-flag 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run -p hi --temp nan 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run -p '' 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run /no/such/checkpoint -p hi 2>/dev/null </dev/null").code == 3);
        CHECK(shell("CUDA_VISIBLE_DEVICES= " + kQuern + " run -ngl all -p hi 2>/dev/null </dev/null").code ==
              5);
        CHECK(shell(kQuern + " run --device -1 -p hi 2>/dev/null </dev/null").code == 2);
        CHECK(shell(kQuern + " run --device 900 -p hi 2>/dev/null </dev/null").code == 5);
        CHECK(shell(kQuern + " bench --device 900 2>/dev/null </dev/null").code == 5);
        CHECK(shell(kQuern +
                    " bench --synthetic qwen3.6-35b-a3b -ngl 0 -d 200000 -np 30 2>/dev/null </dev/null")
                  .code == 4);
        CHECK(
            shell(kQuern + " run -c 8 -p 'a prompt of more tokens than that' 2>/dev/null </dev/null").code ==
            6);
        CHECK(shell(kQuern + " run -n 3 --fail-on-truncation -p hello 2>/dev/null </dev/null").code == 8);
        CHECK(shell(kQuern + " no-such-command 2>/dev/null").code == 2);
        CHECK(shell(kQuern + " --version").code == 0);
        CHECK(shell(kQuern + " quantize-inspect >/dev/null").code == 0);
    }

    TEST_CASE("run: a damaged checkpoint is one line on stderr and exit code 3") {
        test::TempDir directory;
        directory.write("config.json", R"({"model_type":"qwen3_5_moe"})");
        const std::string whole = test::SafetensorsWriter().bf16("lm_head.weight", {2, 4}).bytes();
        directory.write("model.safetensors", whole.substr(0, whole.size() - 1));
        for (const char* command : {" run -ngl 0 -p hi -m ", " bench -ngl 0 -m ", " quantize-inspect "}) {
            CAPTURE(command);
            const Outcome o = shell(kQuern + command + directory.str() + " 2>&1 >/dev/null </dev/null");
            CHECK(o.code == 3);
            CHECK(o.out.starts_with("quern: error: "));
            CHECK(o.out.find("model.safetensors: the file is cut off") != std::string::npos);
            CHECK(o.out.find('\n') == o.out.size() - 1);
        }
    }

    TEST_CASE("run: token ids and logits") {
        test::TempDir directory;
        const std::string ids = directory / "ids", npy = directory / "out.npy";
        std::ofstream(ids) << "1, 2, 3\n4 5";
        const Outcome o =
            shell(kQuern + " run --ids " + ids + " -n 3 --temp 0 --dump-logits " + npy + " 2>/dev/null");
        CHECK(o.code == 0);
        CHECK(o.out.find_first_not_of("0123456789 \n") == std::string::npos);
        std::ifstream file(npy, std::ios::binary);
        const std::string bytes((std::istreambuf_iterator<char>(file)), {});
        CHECK(bytes.substr(1, 5) == "NUMPY");
        CHECK(bytes.find("'shape': (5, ") != std::string::npos);
    }

    TEST_CASE("run: drafts change no token, and can be looked at") {
        test::TempDir directory;
        const std::string ids = directory / "ids", json = directory / "drafts.json";
        std::ofstream(ids) << "10 11 12 13 14 15 16 17 18 19 20 10 11 12 13 14 15 16 17 18";
        const std::string run = kQuern + " run --ids " + ids + " -n 40 --temp 0 --ignore-eos -ngl 0";
        const Outcome plain = shell(run + " 2>/dev/null"),
                      drafted =
                          shell(run + " --spec lookup --draft-max 3 --dump-drafts " + json + " 2>/dev/null");
        CHECK(drafted.code == 0);
        CHECK(drafted.out == plain.out);
        std::ifstream file(json);
        const auto rounds = nlohmann::json::parse(file);
        REQUIRE(!rounds.empty());
        std::istringstream words(plain.out);
        std::vector<int32_t> answer;
        for (int32_t id; words >> id;) answer.push_back(id);
        for (const auto& round : rounds) {
            CHECK(round["drafted"].size() <= 3);
            for (size_t i = 0; i < round["accepted"].get<size_t>(); ++i)
                CHECK(round["drafted"][i] == answer.at(round["position"].get<size_t>() - 20 + i));
        }
        CHECK(shell(run + " --dump-drafts " + json + " 2>&1").code == 2);
    }

    TEST_CASE(
        "run: drafts by an MTP layer can be looked at; without the layer there is an error, or a note") {
        test::TempDir directory;
        const std::string ids = directory / "ids", json = directory / "drafts.json",
                          npy = directory / "drafts.npy";
        std::ofstream(ids) << "10 11 12 13 14 15 16 17 18 19 20";
        const auto run = [&](const std::string& flags) {
            return shell(kQuern + " run --ids " + ids + " -n 12 --temp 0 --ignore-eos -ngl 0 " + flags);
        };
        const std::string model = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/vision_mtp/bf16 ";
        const Outcome plain = run(model + "2>/dev/null"),
                      drafted = run(model + "--spec mtp --draft-max 2 --dump-drafts " + json +
                                    " --dump-draft-logits " + npy + " 2>/dev/null");
        CHECK(drafted.code == 0);
        CHECK(drafted.out == plain.out);
        std::ifstream file(json);
        CHECK(nlohmann::json::parse(file)[0]["drafted"].size() == 2);
        std::ifstream matrix(npy, std::ios::binary);
        const std::string bytes((std::istreambuf_iterator<char>(matrix)), std::istreambuf_iterator<char>());
        CHECK(bytes.find("'shape': (2, 128)") != std::string::npos);
        CHECK(run(model + "--spec lookup --dump-draft-logits " + npy + " 2>&1").code == 2);
        const std::string without = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/bf16 ";
        const Outcome none = run(without + "--spec mtp 2>&1"), noted = run(without + "-v --spec auto 2>&1");
        CHECK(none.code == 3);
        CHECK(none.out.find("no MTP layer") != std::string::npos);
        CHECK(noted.code == 0);
        CHECK(noted.out.find("no drafts by MTP") != std::string::npos);
        const std::string drafter = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/dflash/new ";
        const Outcome blocks =
            run(without + "-md " + drafter + "--dump-draft-logits " + npy + " 2>/dev/null");
        CHECK(blocks.code == 0);
        CHECK(blocks.out == run(without + "2>/dev/null").out);
        std::ifstream block(npy, std::ios::binary);
        const std::string found((std::istreambuf_iterator<char>(block)), std::istreambuf_iterator<char>());
        CHECK(found.find("'shape': (7, 96)") != std::string::npos);
        CHECK(run(without + "--spec dflash 2>&1").out.find("-md DIR") != std::string::npos);
    }
}

}  // namespace
}  // namespace quern
