#include "tools/inspect/report.h"

#include <algorithm>
#include <regex>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {

using Json = nlohmann::ordered_json;

namespace {

std::string role_of(const TensorUse::Entry& e) {
    if (e.state == TensorUse::State::used) return e.role;
    if (e.state == TensorUse::State::unused) return std::string("unused: ") + unused_reason_text(e.reason);
    return "UNKNOWN";
}

/// Problems, notes and the verdict.
std::string findings(const Inspection& in) {
    std::string text;
    if (!in.failure.empty()) text += "problem: " + printable(in.failure, 4000) + "\n";
    for (const std::string& p : in.audit.problems) text += "problem: " + p + "\n";
    for (const std::string& n : in.audit.notes) text += "note: " + n + "\n";
    return text +
           (in.clean() ? "\naudit: clean\n" : "\naudit: NOT CLEAN, quern will not run this checkpoint\n");
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

/// Every class of tensors: the roles of the used ones, the reasons of the unused ones, the unknown ones.
std::map<std::string, Audit::Count> classes(const Inspection& in) {
    std::map<std::string, Audit::Count> out;
    for (uint32_t i = 0; i < in.checkpoint.tensors().size(); ++i) {
        const TensorUse::Entry& e = in.use.entry(i);
        Audit::Count& c = out[e.state == TensorUse::State::used ? "used as " + role_of(e) : role_of(e)];
        ++c.tensors;
        c.bytes += in.checkpoint.tensors()[i].tensor->bytes();
    }
    return out;
}

}  // namespace

void print_tensors(const Inspection& in, const std::string& pattern, Output& out) {
    std::string text;
    for_each_tensor(in, pattern, [&](const CheckpointTensor& t, const TensorUse::Entry& e) {
        text += fmt::format("{:72} {:8} {:18} {:>12}  {:24} {}\n", printable(t.tensor->name, 200),
                            printable(dtype_text(*t.tensor), 40), shape_text(t.tensor->dims()),
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
    const std::string second_half = c.dense()
                                        ? fmt::format("MLP of {}", c.dense_width)
                                        : fmt::format("{} experts ({} used)", c.experts, c.experts_used);
    std::string text = fmt::format(
        "{}\n  {}: {} layers ({} attention, {} DeltaNet), width {}, {}, vocabulary {}\n"
        "  quantization: {}{}{}\n\n",
        in.checkpoint.files().directory, c.architecture(), c.layers,
        std::count(c.full_attention.begin(), c.full_attention.end(), true),
        std::count(c.full_attention.begin(), c.full_attention.end(), false), c.width, second_half,
        c.vocab_rows, q.method.empty() ? "none declared" : printable(q.method),
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
    out.write(text + in.audit.totals() + findings(in));
}

void print_audit(const Inspection& in, Output& out) {
    const Fingerprint f = fingerprint(in.checkpoint);
    const QuantInfo& q = in.checkpoint.quant();
    std::string text = in.checkpoint.files().directory + "\n";
    const auto line = [&](const char* what, const std::string& is) {
        text += fmt::format("  {:12} {}\n", what, is.empty() ? "none" : printable(is));
    };
    line("producer", f.producer);
    line("declared", q.method + (q.format.empty() ? "" : ", " + q.format));
    line("scheme", fmt::format("{}: {} NVFP4 matrices, {} with an activation scale", f.scheme(),
                               f.nvfp4_modules, f.with_input_scale));
    line("KV cache", q.kv_cache);
    line("MTP", f.mtp);
    line("vision", f.vision ? "present" : "absent");
    text += fmt::format("\n  {:>8} {:>15}\n", "tensors", "bytes");
    Audit::Count sum;
    for (const auto& [name, c] : classes(in)) {
        text += fmt::format("  {:>8} {:>15}  {}\n", c.tensors, c.bytes, name);
        sum.tensors += c.tensors;
        sum.bytes += c.bytes;
    }
    text += fmt::format("  {:>8} {:>15}  file headers\n  {:>8} {:>15}  in all, of {} bytes of files\n\n", "",
                        in.audit.header_bytes, sum.tensors, sum.bytes + in.audit.header_bytes,
                        in.audit.file_bytes);
    out.write(text + findings(in));
}

Json inspection_json(const Inspection& in, const std::string& pattern) {
    Json j;
    j["directory"] = in.checkpoint.files().directory;
    j["clean"] = in.clean();
    j["problems"] = in.audit.problems;
    if (!in.failure.empty()) j["problems"].push_back(in.failure);
    j["notes"] = in.audit.notes;
    const Fingerprint f = fingerprint(in.checkpoint);
    j["producer"] = f.producer;
    j["scheme"] = f.scheme();
    j["nvfp4_matrices"] = f.nvfp4_modules;
    j["activation_scales"] = f.with_input_scale;
    j["mtp"] = f.mtp;
    j["vision"] = f.vision;
    j["kv_cache"] = in.checkpoint.quant().kv_cache;
    j["classes"] = Json::array();
    for (const auto& [name, c] : classes(in))
        j["classes"].push_back({{"class", name}, {"tensors", c.tensors}, {"bytes", c.bytes}});
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
             {"dtype", dtype_text(*t.tensor)},
             {"shape", std::vector<int64_t>(t.tensor->dims().begin(), t.tensor->dims().end())},
             {"bytes", t.tensor->end - t.tensor->begin},
             {"role", role_of(e)},
             {"shard", in.checkpoint.shard_name(t.shard)}});
    });
    return j;
}

}  // namespace quern
