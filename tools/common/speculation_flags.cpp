#include "tools/common/speculation_flags.h"

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"

namespace quern {

DrafterKind parse_drafter(const std::string& value, const std::string& what) {
    if (value == "none") return DrafterKind::none;
    if (value == "auto") return DrafterKind::automatic;
    if (value == "lookup" || value == "ngram") return DrafterKind::lookup;
    if (value == "mtp") return DrafterKind::mtp;
    if (value == "dflash") return DrafterKind::dflash;
    FAIL(usage, "{}: expected auto, none, lookup, mtp or dflash, found '{}'", what, printable(value));
}

void apply_speculative_config(const std::string& json, SpeculationOptions& options) {
    constexpr const char* kFlag = "--speculative-config";
    const nlohmann::json object = parse_json(json, kFlag, {.max_depth = 4, .kind = ErrorKind::usage});
    if (!object.is_object()) FAIL(usage, "{}: expected a JSON object", kFlag);
    if (!object.contains("method"))
        FAIL(usage, "{}: 'method' is missing; there are ngram, mtp, dflash, auto and none", kFlag);
    for (const auto& [key, value] : object.items()) {
        if (key == "method") {
            if (!value.is_string()) FAIL(usage, "{}: method must be a text", kFlag);
            options.kind = parse_drafter(value.get<std::string>(), std::string(kFlag) + ", method");
            options.kind_given = true;
        } else if (key == "num_speculative_tokens") {
            if (!value.is_number_integer() || value < 1 || value > kMaxDraft)
                FAIL(usage, "{}: num_speculative_tokens must be a whole number from 1 to {}", kFlag,
                     kMaxDraft);
            options.draft_max = value.get<int64_t>();
        } else if (key == "model") {
            if (!value.is_string()) FAIL(usage, "{}: model must be a text", kFlag);
            options.draft_model = value.get<std::string>();
        } else {
            FAIL(usage, "{}: '{}' is not supported; there are method, model and num_speculative_tokens",
                 kFlag, printable(key));
        }
    }
}

void add_draft_head_flag(ArgParser& parser, SpeculationOptions& options) {
    parser.value(
        "--draft-head", "full|short",
        "short (default): where the model's head is large, drafters choose from as many of its rows as "
        "the text needs, in NVFP4, and on a GPU a drafter's layers in 16 bits become FP8, an MTP layer's "
        "experts "
        "NVFP4 if the model's are; full: from all of it, with weights as stored, which takes longer and is "
        "right a little more often",
        [&options](const std::string& v) {
            if (v != "full" && v != "short")
                FAIL(usage, "--draft-head: expected full or short, found '{}'", printable(v));
            options.short_head = v == "short";
        });
}

void name_draft_model(const std::string& path, SpeculationOptions& options) {
    if (path.empty()) FAIL(usage, "-md: the path of the drafter is empty");
    options.draft_model = path;
    if (!options.kind_given) options.kind = DrafterKind::dflash;
}

void add_speculation_flags(ArgParser& parser, SpeculationOptions& options) {
    parser.section("Speculation (never changes an answer)");
    parser.value(
        kSpecNames, "auto|none|lookup|mtp|dflash",
        "draft the next tokens and verify several in one step. lookup: what followed the same words before, "
        "in the prompt and the answer; mtp: the checkpoint's layer for multi-token prediction; dflash: the "
        "drafter "
        "of -md, or in the folder dflash of the checkpoint; auto: the best that there is, and lookup; none "
        "(default)",
        [&options](const std::string& v) {
            options.kind = parse_drafter(v, "--spec");
            options.kind_given = true;
        });
    parser.value(kDraftMaxNames, "N",
                 fmt::format("tokens of a draft at most, 1 to {}; default {}", kMaxDraft, options.draft_max),
                 [&options](const std::string& v) {
                     options.draft_max = parse_integer(v, "--draft-max", 1, kMaxDraft);
                 });
    add_draft_head_flag(parser, options);
    parser.value(kDraftModelNames, "DIR", kDraftModelHelp,
                 [&options](const std::string& v) { name_draft_model(v, options); });
    parser.value("--speculative-config", "JSON",
                 "the same as vLLM writes it: method, model, num_speculative_tokens",
                 [&options](const std::string& v) { apply_speculative_config(v, options); });
}

}  // namespace quern
