// quern quantize-inspect: what a checkpoint holds, read from its headers only.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "ggml-like/check.h"
#include "models/checkpoint.h"
#include "models/qwen3_6_moe.h"
#include "models/tensor_use.h"
#include "tools/cli_args.h"
#include "tools/cli_values.h"
#include "tools/commands.h"
#include "tools/loading.h"
#include "tools/run/output.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
    std::string model, tensors;
    bool json = false;
};

/// One line of the group table.
struct Group {
    int64_t matrices = 0;
    int64_t bytes = 0;
    double token_bytes = 0;  // read for one decoded token
};
using Groups = std::map<std::pair<std::string, std::string>, Group>;  // (what, format)

struct Inspection {
    Checkpoint checkpoint;
    Qwen36MoeConfig config;
    TensorUse use;
    Audit audit;
    Groups groups;
    std::string failure;  // why the text model could not be read; empty if it was

    explicit Inspection(const std::string& path)
        : checkpoint(Checkpoint::open(path)),
          config(parse_qwen3_6_moe_config(checkpoint.config(), checkpoint.files().config)),
          use(checkpoint, ReadMode::headers) {
        try {
            group(read_qwen3_6_moe_weights(checkpoint, config, use));
        } catch (const Error& error) {
            failure = error.what();
        }
        audit = use.audit();
    }

    bool clean() const { return failure.empty() && audit.ok(); }

  private:
    static const char* format_name(const WeightSegment& s) {
        switch (s.scale_kind) {
            case ScaleKind::nvfp4:
                return "NVFP4";
            case ScaleKind::per_tensor:
                return "FP8 per tensor";
            case ScaleKind::per_row:
                return "FP8 per channel";
            case ScaleKind::block128:
                return "FP8 block 128";
            case ScaleKind::none:
                break;
        }
        return dtype_name(s.dtype);
    }

    void count(const char* what, const Weight& w, double share) {
        for (const WeightSegment& s : w.segments) {
            Group& g = groups[{what, format_name(s)}];
            ++g.matrices;
            g.bytes += s.bytes();
            g.token_bytes += share * static_cast<double>(s.bytes());
        }
    }

    void group(const Qwen36MoeWeights& w) {
        const double used = static_cast<double>(config.experts_used) / static_cast<double>(config.experts);
        count("embedding", w.embedding, 1.0 / static_cast<double>(config.vocab_rows));
        if (config.tied_head)
            groups[{"embedding", format_name(w.head.segments[0])}].token_bytes +=
                static_cast<double>(w.head.bytes());
        else
            count("lm_head", w.head, 1);
        for (const LayerWeights& l : w.layers) {
            if (l.attention.in_proj) {
                count("attention: q, gate, k, v", l.attention.in_proj, 1);
                count("attention: output", l.attention.out_proj, 1);
            } else {
                count("DeltaNet: qkv, z, a, b", l.delta.in_proj, 1);
                count("DeltaNet: output", l.delta.out_proj, 1);
            }
            count("router and shared gate", l.moe.router, 1);
            for (const Weight& e : l.moe.gate_up.expert) count("experts: gate, up", e, used);
            for (const Weight& e : l.moe.down.expert) count("experts: down", e, used);
            count("shared expert", l.moe.shared_gate_up, 1);
            count("shared expert", l.moe.shared_down, 1);
        }
    }
};

std::string role_of(const TensorUse::Entry& e) {
    if (e.state == TensorUse::State::used) return e.role;
    if (e.state == TensorUse::State::unused) return std::string("unused: ") + unused_reason_text(e.reason);
    return "UNKNOWN";
}

/// Tensors whose name matches; all if the pattern is empty.
template <typename F>
void for_each_tensor(const Inspection& in, const std::string& pattern, F&& f) {
    std::regex expression;
    try {
        expression.assign(pattern.empty() ? "." : pattern);
    } catch (const std::regex_error& error) {
        FAIL(usage, "--tensors '{}' is no regular expression: {}", printable(pattern), error.what());
    }
    for (uint32_t i = 0; i < in.checkpoint.tensors().size(); ++i) {
        const CheckpointTensor& t = in.checkpoint.tensors()[i];
        if (pattern.empty() || std::regex_search(t.tensor->name.begin(), t.tensor->name.end(), expression))
            f(t, in.use.entry(i));
    }
}

void print_tensors(const Inspection& in, const std::string& pattern, Output& out) {
    std::string text;
    for_each_tensor(in, pattern, [&](const CheckpointTensor& t, const TensorUse::Entry& e) {
        text += fmt::format("{:72} {:8} {:18} {:>12}  {:24} {}\n", printable(t.tensor->name, 200),
                            safe_dtype_name(t.tensor->dtype), shape_text(t.tensor->dims()),
                            t.tensor->end - t.tensor->begin, role_of(e), in.checkpoint.shard_name(t.shard));
        if (text.size() > 1 << 16) {
            out.write(text);
            text.clear();
        }
    });
    out.write(text);
}

void print_summary(const Inspection& in, Output& out) {
    const Qwen36MoeConfig& c = in.config;
    const QuantInfo& q = in.checkpoint.quant();
    std::string text = fmt::format(
        "{}\n  qwen3_5_moe: {} layers ({} attention, {} DeltaNet), width {}, {} experts ({} used), "
        "vocabulary {}\n"
        "  quantization: {}{}{}\n\n",
        in.checkpoint.files().directory, c.layers,
        std::count(c.full_attention.begin(), c.full_attention.end(), true),
        std::count(c.full_attention.begin(), c.full_attention.end(), false), c.width, c.experts,
        c.experts_used, c.vocab_rows, q.method.empty() ? "none declared" : printable(q.method),
        q.format.empty() ? "" : ", " + printable(q.format),
        q.producer.empty() ? "" : ", " + printable(q.producer));
    text += fmt::format("  {:26} {:16} {:>9} {:>12} {:>16}\n", "part", "format", "matrices", "bytes",
                        "read per token");
    double token_bytes = 0;
    int64_t bytes = 0;
    for (const auto& [key, g] : in.groups) {
        text += fmt::format("  {:26} {:16} {:>9} {:>12} {:>16.0f}\n", key.first, key.second, g.matrices,
                            g.bytes, g.token_bytes);
        token_bytes += g.token_bytes;
        bytes += g.bytes;
    }
    text += fmt::format("  {:26} {:16} {:>9} {:>12} {:>16.0f}\n\n", "sum of matrices", "", "", bytes,
                        token_bytes);
    out.write(text + in.audit.text() + (in.failure.empty() ? "" : "\n" + printable(in.failure, 4000)) + "\n" +
              (in.clean() ? "audit: clean\n" : "audit: NOT CLEAN, quern will not run this checkpoint\n"));
}

Json to_json(const Inspection& in, const std::string& pattern) {
    Json j;
    j["directory"] = in.checkpoint.files().directory;
    j["clean"] = in.clean();
    j["problems"] = in.audit.problems;
    if (!in.failure.empty()) j["problems"].push_back(in.failure);
    j["notes"] = in.audit.notes;
    j["file_bytes"] = in.audit.file_bytes;
    j["used"] = {{"tensors", in.audit.used.tensors}, {"bytes", in.audit.used.bytes}};
    j["unknown"] = {{"tensors", in.audit.unknown.tensors}, {"bytes", in.audit.unknown.bytes}};
    j["groups"] = Json::array();
    for (const auto& [key, g] : in.groups)
        j["groups"].push_back({{"part", key.first},
                               {"format", key.second},
                               {"matrices", g.matrices},
                               {"bytes", g.bytes},
                               {"token_bytes", g.token_bytes}});
    j["tensors"] = Json::array();
    for_each_tensor(in, pattern, [&](const CheckpointTensor& t, const TensorUse::Entry& e) {
        j["tensors"].push_back(
            {{"name", t.tensor->name},
             {"dtype", safe_dtype_name(t.tensor->dtype)},
             {"shape", std::vector<int64_t>(t.tensor->dims().begin(), t.tensor->dims().end())},
             {"bytes", t.tensor->end - t.tensor->begin},
             {"role", role_of(e)},
             {"shard", in.checkpoint.shard_name(t.shard)}});
    });
    return j;
}

}  // namespace

int cmd_quantize_inspect(int argc, char** argv) {
    open_standard_descriptors();
    Options o;
    ArgParser parser("quantize-inspect",
                     "list a checkpoint's tensors and check that every byte is accounted for",
                     "[MODEL] [FLAGS]");
    parser.section("Flags");
    parser.positional(
        "MODEL", "directory, a file in it, or a repo id in the local Hugging Face cache; left out: the demo",
        [&](const std::string& v) { o.model = v; });
    parser.value("-m,--model", "PATH", "as MODEL", [&](const std::string& v) { o.model = v; });
    parser.value("--tensors", "REGEX", "list the tensors whose name matches; . for all",
                 [&](const std::string& v) { o.tensors = v; });
    parser.toggle("--json", "everything as one JSON object", [&](bool v) { o.json = v; });
    parser.footer("Reads headers only, never weights. Exit codes: 0 clean, 2 usage, 3 not clean.\n");
    if (!parser.parse(argc, argv)) return 0;

    const Inspection in(model_or_demo(o.model));
    Output out(1);
    if (o.json) {
        out.write(to_json(in, o.tensors).dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
    } else {
        if (!o.tensors.empty())
            print_tensors(in, o.tensors, out);
        else
            print_summary(in, out);
    }
    return in.clean() ? 0 : static_cast<int>(ErrorKind::model);
}

}  // namespace quern
