// Safetensors files, right and wrong. Every wrong file must give one Error(model) that names file and cause.
#include "ggml-like/safetensors.h"

#include <doctest/doctest.h>

#include <sys/stat.h>

#include <cstring>

#include "ggml-like/json_pull.h"

#include "checkpoint_writer.h"

using namespace quern;
using namespace quern::test;

namespace {

SafetensorsHeader parse(const std::string& file) {
    return parse_safetensors_header(std::as_bytes(std::span(file.data(), file.size())), file.size(),
                                    "f.safetensors");
}

/// The error of a file with this header and `data` bytes of data.
std::string header_error(const std::string& json, size_t data = 0) {
    const std::string file = with_length(json) + std::string(data, '\0');
    return model_error([&] { parse(file); });
}

std::string one(const std::string& fields, size_t data = 4) {
    return header_error("{\"x\":{" + fields + "}}", data);
}

std::string file_error(const std::string& path) {
    return model_error([&] { SafetensorsFile::open(path); });
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("safetensors: a good file") {
        SafetensorsWriter w;
        w.add("second", "F32", {2, 1}, raw_bytes({1.5f, -2.0f})).fill("empty", "BF16", {0, 7}, 0);
        w.add("scalar", "F32", {}, f32_bytes(3))
            .fill("byte", "U8", {3}, 3, 'x')
            .bf16("rank5", {1, 1, 1, 1, 2});
        TempDir dir;
        const std::string path = dir.write("m.safetensors", w.bytes());
        const SafetensorsFile file = SafetensorsFile::open(path);
        REQUIRE(file.tensors().size() == 5);
        CHECK(file.file_size() == w.bytes().size());
        const SafeTensor* t = file.find("second");
        REQUIRE(t != nullptr);
        CHECK(describe(*t) == "[2, 1] F32");
        float values[2];
        memcpy(values, t->data, sizeof values);
        CHECK(values[0] == 1.5f);
        CHECK(values[1] == -2.0f);
        CHECK(file.find("scalar")->rank == 0);
        CHECK(file.find("scalar")->elements() == 1);
        CHECK(file.find("empty")->elements() == 0);
        CHECK(static_cast<char>(file.find("byte")->data[2]) == 'x');
        CHECK(file.find("rank5")->has_shape({1, 1, 1, 1, 2}));
        CHECK_FALSE(file.find("rank5")->has_shape({1, 1, 1, 2}));
        CHECK(file.find("Second") == nullptr);
        file.check_unchanged();
        SafetensorsFile moved = SafetensorsFile::open(path);
        SafetensorsFile target = std::move(moved);
        CHECK(target.find("second")->has_shape({2, 1}));
    }

    TEST_CASE("safetensors: tensors may be described in any order, with escapes, spaces and metadata") {
        const std::string json =
            " {\"__metadata__\" : {\"format\":\"pt\", \"a\\u00e9\":\"\\\"\"} ,\n"
            "\"\\u0062\":{\"data_offsets\":[2,4],\"shape\":[1],\"dtype\":\"F16\"},"
            "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}   ";
        const std::string file = with_length(json.substr(1)) + "data";
        const SafetensorsHeader h = parse(file);
        REQUIRE(h.tensors.size() == 2);
        CHECK(h.tensors[0].name == "a");
        CHECK(h.tensors[1].name == "b");
        REQUIRE(h.metadata.size() == 2);
        CHECK(h.metadata[1].first == "a\xc3\xa9");
        CHECK(h.metadata[1].second == "\"");
        CHECK(parse(with_length("{}")).tensors.empty());
        CHECK(contains(header_error(json), "the header starts with"));  // a space before '{' is not allowed
    }

    TEST_CASE("safetensors: wrong lengths") {
        CHECK(contains(model_error([] { parse(""); }), "is empty"));
        CHECK(contains(model_error([] { parse("1234567"); }), "at least 8 bytes, found 7"));
        const auto with = [](uint64_t n) { return model_error([&] { parse(raw_bytes({n}) + "{}"); }); };
        CHECK(contains(with(0), "starts with ''"));
        CHECK(contains(with(1), "JSON error"));
        CHECK(contains(with(3), "should take 3 bytes, 2 are there"));
        CHECK(contains(with(100'000'000), "cut off"));
        CHECK(contains(with(100'000'001), "above 100000000"));
        CHECK(contains(with(uint64_t{1} << 63), "above 100000000"));
        CHECK(contains(with(~uint64_t{0}), "above 100000000"));
        CHECK(with(2) == "<no error>");
        // The file is longer than what was given of it.
        const std::string start = raw_bytes({uint64_t{90}}) + "{}";
        CHECK(contains(model_error([&] {
                           parse_safetensors_header(std::as_bytes(std::span(start.data(), start.size())),
                                                    1000, "f");
                       }),
                       "header of 90 bytes, 2 given"));
    }

    TEST_CASE("safetensors: broken JSON") {
        for (const std::string& json : std::initializer_list<std::string>{"{",
                                                                          "{]",
                                                                          "{}x",
                                                                          "{} }",
                                                                          "{\"a\"}",
                                                                          "{\"a\":1}",
                                                                          "{,}",
                                                                          "{\"a\":{},}",
                                                                          "{'a':{}}",
                                                                          "{\"a\":[]}",
                                                                          "{\"\\x\":{}}",
                                                                          "{\"\\ud800\":{}}",
                                                                          "{\"\\udc00\":{}}",
                                                                          "{\"\\ud800\\u0041\":{}}",
                                                                          "{\"\\u12g4\":{}}",
                                                                          "{\"a\nb\":{}}",
                                                                          "{\"\xff\":{}}",
                                                                          "{\"\xc0\x80\":{}}",
                                                                          "{\"\xed\xa0\x80\":{}}",
                                                                          "{\"\xf5\x80\x80\x80\":{}}",
                                                                          "{\"unterminated",
                                                                          "{\"unterminated\\",
                                                                          "{\"a\":null}",
                                                                          "{/**/}",
                                                                          std::string("{\0}", 3)}) {
            CAPTURE(json);
            CHECK(contains(header_error(json), "f.safetensors: JSON error at byte"));
        }
        CHECK(contains(header_error("[]"), "starts with '[]', expected '{'"));
        CHECK(contains(header_error("\xef\xbb\xbf{}"), "starts with '\\xef\\xbb\\xbf{}'"));
        CHECK(contains(header_error("{\"\\u0000\":{}}"), "NUL"));
        CHECK(contains(header_error("{\"\":{}}"), "empty name"));
        for (const size_t depth : {size_t{10}, size_t{100'000}}) {
            CHECK(contains(header_error("{\"a\":" + std::string(depth, '[')), "JSON error"));
            CHECK(contains(one(R"("shape":)" + std::string(depth, '[')), "JSON error"));
            CHECK(contains(header_error(std::string(depth, '{')), "JSON error"));
        }
    }

    TEST_CASE("safetensors: metadata is strings only, once") {
        CHECK(header_error(R"({"__metadata__":{}})") == "<no error>");
        CHECK(contains(header_error(R"({"__metadata__":{"a":1}})"), "strings only"));
        CHECK(contains(header_error(R"({"__metadata__":{"a":{"b":"c"}}})"), "strings only"));
        CHECK(contains(header_error(R"({"__metadata__":null})"), "JSON error"));
        CHECK(contains(header_error(R"({"__metadata__":{"a":"1","a":"2"}})"), "'a' twice"));
        CHECK(contains(header_error(R"({"__metadata__":{},"__metadata__":{}})"), "twice"));
    }

    TEST_CASE("safetensors: wrong descriptions of a tensor") {
        const std::string good = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
        CHECK(one(good) == "<no error>");
        CHECK(contains(one(R"("dtype":"F32","shape":[1])"), "found less"));
        CHECK(contains(one(R"("dtype":"F32","data_offsets":[0,4])"), "found less"));
        CHECK(contains(one(R"("shape":[1],"data_offsets":[0,4])"), "found less"));
        CHECK(contains(one(good + R"(,"data_offsets":[0,4])"), "'data_offsets' appears twice"));
        CHECK(contains(one(good + R"(,"dtype":"F32")"), "'dtype' appears twice"));
        CHECK(contains(one(good + R"(,"stride":[1])"), "unknown key 'stride'"));
        CHECK(contains(header_error("{\"x\":{" + good + "},\"x\":{" + good + "}}", 4),
                       "tensor 'x' appears twice"));
        CHECK(contains(header_error("{\"x\":{" + good + "},\"\\u0078\":{" + good + "}}", 4),
                       "'x' appears twice"));
    }

    TEST_CASE("safetensors: any dtype is taken, and the bytes of all known ones are counted") {
        const auto sized = [](const char* dtype, int elements, size_t bytes) {
            return one(
                fmt::format(R"("dtype":"{}","shape":[{}],"data_offsets":[0,{}])", dtype, elements, bytes),
                bytes);
        };
        // Elements and bytes as the format description has them.
        for (const auto& [dtype, elements, bytes] : {std::tuple("F4", 6, 3),
                                                     {"F6_E2M3", 8, 6},
                                                     {"F6_E3M2", 4, 3},
                                                     {"F8_E8M0", 5, 5},
                                                     {"F8_E4M3FNUZ", 5, 5},
                                                     {"F8_E5M2FNUZ", 5, 5},
                                                     {"C64", 2, 16},
                                                     {"BF16", 3, 6}}) {
            const auto& this_dtype = dtype;
            CAPTURE(this_dtype);
            const auto size = static_cast<size_t>(bytes);
            CHECK(sized(dtype, elements, size) == "<no error>");
            CHECK(contains(sized(dtype, elements, size + 1), fmt::format("needs {} bytes", bytes)));
        }
        CHECK(contains(sized("F4", 5, 3), "[5] F4 ends within a byte"));
        // The size of what nobody has heard of is not known: its bytes are those it has.
        for (const char* dtype : {"U4", "f32", "", "F8_E4M3FN", "I3_K", "\\u0041\\n"}) {
            CAPTURE(dtype);
            for (const size_t bytes : {0, 1, 7}) CHECK(sized(dtype, 4, bytes) == "<no error>");
        }
        TempDir dir;
        SafetensorsWriter w;
        w.fill("a", "F8_E8M0", {2, 3}, 6).fill("b", "I3_K", {5, 7}, 9).bf16("c", {2});
        const SafetensorsFile file = SafetensorsFile::open(dir.write("x.safetensors", w.bytes()));
        CHECK(describe(*file.find("a")) == "[2, 3] F8_E8M0");
        CHECK(describe(*file.find("b")) == "[5, 7] I3_K");
        CHECK(file.find("b")->elements() == 35);
        CHECK(file.find("b")->bytes() == 9);
        CHECK(file.find("c")->begin == 15);
    }

    TEST_CASE("safetensors: wrong offsets") {
        const auto offsets = [](const std::string& o) {
            return one(R"("dtype":"U8","shape":[4],"data_offsets":)" + o);
        };
        CHECK(offsets("[0,4]") == "<no error>");
        CHECK(contains(offsets("[4,0]"), "run backwards"));
        CHECK(contains(offsets("[-1,3]"), "whole number >= 0"));
        CHECK(contains(offsets("[0.0,4]"), "whole number in digits"));
        CHECK(contains(offsets("[0,4e0]"), "whole number in digits"));
        CHECK(contains(offsets("[0,1e3]"), "whole number in digits"));
        CHECK(contains(offsets("[\"0\",4]"), "whole number"));
        CHECK(contains(offsets("[0,4,4]"), "after two data_offsets"));
        CHECK(contains(offsets("[0]"), "between the two"));
        CHECK(contains(offsets("[]"), "JSON error"));
        CHECK(contains(offsets("[00,4]"), "leading zero"));
        CHECK(contains(offsets("[0,18446744073709551616]"), "number above 18446744073709551615"));
        CHECK(contains(offsets("[0,99999999999999999999999999]"), "number above"));
        CHECK(contains(offsets("[0,18446744073709551615]"), "needs 4 bytes"));
        CHECK(contains(offsets("[18446744073709551615,18446744073709551615]"), "needs 4 bytes"));
        CHECK(contains(offsets("[1,5]"), "there is a gap before it"));
        CHECK(contains(offsets("[0,3]"), "needs 4 bytes, but data_offsets [0, 3] hold 3"));
        const auto two = [](const std::string& a, const std::string& b) {
            return header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                                    R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                                8);
        };
        CHECK(two("[0,4]", "[4,8]") == "<no error>");
        CHECK(two("[4,8]", "[0,4]") == "<no error>");
        CHECK(contains(two("[0,4]", "[0,4]"), "overlaps"));
        CHECK(contains(two("[0,4]", "[2,6]"), "overlaps"));
        CHECK(contains(two("[0,4]", "[5,9]"), "gap"));
    }

    TEST_CASE("safetensors: shapes whose product overflows, or is zero") {
        const auto shape = [](const std::string& s, size_t data = 0) {
            return one(fmt::format(R"("dtype":"F32","shape":{},"data_offsets":[0,{}])", s, data), data);
        };
        CHECK(shape("[0]") == "<no error>");
        CHECK(shape("[5,0,3]") == "<no error>");
        CHECK(shape("[]", 4) == "<no error>");
        CHECK(shape("[1,1,1,1,1,1,1,1]", 4) == "<no error>");
        CHECK(contains(shape("[4294967296,4294967296]"), "more than 2^61 bytes"));
        CHECK(contains(shape("[9223372036854775807,9223372036854775807,0]"), "more than 2^61 bytes"));
        CHECK(contains(shape("[4611686018427387904]"), "more than 2^61 bytes"));
        CHECK(contains(shape("[0,18446744073709551615]"), "number above"));
        CHECK(contains(shape("[1,1,1,1,1,1,1,1,1]", 4), "more than 8 dimensions"));
        std::string rank64 = "[1";
        for (int i = 1; i < 64; ++i) rank64 += ",1";
        CHECK(contains(shape(rank64 + "]", 4), "more than 8 dimensions"));
        CHECK(contains(shape("[-1]", 4), "whole number"));
        CHECK(contains(shape("[1.5]", 4), "whole number"));
        CHECK(contains(shape("[1,]", 4), "whole number"));
        CHECK(contains(shape("4", 4), "JSON error"));
    }

    TEST_CASE("safetensors: data missing or left over") {
        SafetensorsWriter w;
        w.bf16("a", {8}).bf16("b", {8});
        const std::string file = w.bytes();
        CHECK(contains(model_error([&] { parse(file.substr(0, file.size() - 1)); }),
                       "cut off: 1 bytes are missing"));
        CHECK(contains(model_error([&] { parse(file.substr(0, file.size() - 20)); }),
                       "cut off: 20 bytes are missing"));
        CHECK(contains(model_error([&] { parse(file + "x"); }), "1 bytes after the last tensor"));
        CHECK(contains(header_error("{}", 3), "3 bytes after the last tensor"));
    }

    TEST_CASE("safetensors: names in messages cannot harm a terminal") {
        const std::string message = header_error("{\"\\u001b[31mred\\u202e\":{\"dtype\":\"Q\"}}");
        CHECK(contains(message, "\\x1b[31mred\\xe2\\x80\\xae"));
        CHECK(message.find('\x1b') == std::string::npos);
        const std::string flood = header_error("{\"" + std::string(100'000, 'n') + "\":{\"dtype\":\"Q\"}}");
        CHECK(flood.size() < 500);
    }

    TEST_CASE("safetensors: things that are not such files") {
        TempDir dir;
        const auto error = [&](const std::string& bytes) {
            return file_error(dir.write("x.safetensors", bytes));
        };
        CHECK(contains(error("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
                       "git lfs pull"));
        CHECK(contains(error("<!DOCTYPE html><html><body>login</body></html>"), "web page"));
        CHECK(contains(error("\n <html>"), "web page"));
        CHECK(contains(error("GGUF\3\0\0\0aaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "GGUF"));
        CHECK(contains(error("PK\3\4aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"), "PyTorch"));
        CHECK(contains(error("{\"weight_map\": {\"a\": \"b\"}}"), "bare JSON"));
        CHECK(contains(error(std::string(4096, '\0')), "only zeros"));
        CHECK(contains(error(""), "is empty"));
        CHECK(contains(file_error(dir.str()), "found a directory"));
        CHECK(contains(file_error("/dev/zero"), "found a device"));
        CHECK(contains(file_error(dir / "nothing"), "No such file"));
        const std::string fifo = dir / "fifo.safetensors";
        REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
        CHECK(contains(file_error(fifo), "found a FIFO"));
        std::filesystem::create_symlink("loop", dir / "loop");
        CHECK(contains(file_error(dir / "loop"), "leads back to itself"));
        std::filesystem::create_symlink("gone", dir / "dangling");
        CHECK(contains(file_error(dir / "dangling"), "target is missing"));
        if (geteuid() != 0) {  // root reads everything
            const std::string secret = dir.write("secret.safetensors", "x");
            chmod(secret.c_str(), 0);
            CHECK(contains(file_error(secret), "Permission denied"));
        }
    }

    TEST_CASE("safetensors: a file that changes while it is open is noticed") {
        TempDir dir;
        SafetensorsWriter w;
        w.bf16("a", {4096});
        const std::string path = dir.write("m.safetensors", w.bytes());
        const SafetensorsFile file = SafetensorsFile::open(path);
        file.check_unchanged();
        std::filesystem::resize_file(path, 100);
        CHECK(contains(model_error([&] { file.check_unchanged(); }), "was changed while it was in use"));
        CHECK(file.find("a")->has_shape({4096}));  // descriptions do not live in the mapping
    }

    TEST_CASE("json pull reader: a character that ends or spoils a string is seen wherever it stands") {
        for (size_t at = 0; at < 24; ++at) {
            CAPTURE(at);
            const std::string before(at, 'a'), after(24 - at, '~');
            const auto read = [&](const std::string& middle) {
                const std::string text = '"' + before + middle + after + '"';
                std::string found, scratch;
                const std::string error =
                    model_error([&] { found = JsonPull(text, "t").string(scratch, "here"); });
                return error == "<no error>" ? found : error;
            };
            CHECK(read(" ") == before + ' ' + after);
            CHECK(read("\x7f") == before + "\x7f" + after);
            CHECK(read("\"") == before);
            CHECK(read("\\n") == before + '\n' + after);
            CHECK(read("\u00e9\u4e2d") == before + "\u00e9\u4e2d" + after);
            CHECK(contains(read("\xff"), "not valid UTF-8"));
            for (const char c : {'\0', '\1', '\n', '\x1f'})
                CHECK(
                    contains(read(std::string(1, c)), fmt::format("at byte {}: control character", at + 1)));
        }
    }

    TEST_CASE("json pull reader: skipped values are checked too") {
        const auto skip = [](const std::string& text) {
            return model_error([&] {
                JsonPull json(text, "t");
                json.skip_value("here");
                json.end();
            });
        };
        for (const char* good : {"1", "-0.5e+10", "\"a\\n\"", "true", "null", "[]", "{}",
                                 "[1,[2,{\"a\":[]}],\"x\"]", " { \"a\" : { } , \"b\" : [ 1 , 2 ] } "}) {
            CAPTURE(good);
            CHECK(skip(good) == "<no error>");
        }
        for (const char* bad : {"", "tru", "01", "-", "1.", "1e", "[1,]", "[1 2]", "{\"a\"}", "{\"a\":}",
                                "{a:1}", "[1}", "{\"a\":1]", "]", "[", "{\"a\":1,}", "+1", ".5", "NaN"}) {
            CAPTURE(bad);
            CHECK(contains(skip(bad), "JSON error"));
        }
        CHECK(skip(std::string(64, '[') + std::string(64, ']')) == "<no error>");
        CHECK(contains(skip(std::string(65, '[') + std::string(65, ']')), "deeper than 64"));
        CHECK(contains(skip(std::string(1'000'000, '[')), "deeper than 64"));
    }
}
