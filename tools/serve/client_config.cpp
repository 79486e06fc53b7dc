#include "tools/serve/client_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "tools/common/cli_values.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// What all of them are told.
struct Server {
    std::string address, api, key, model;
    int64_t context;  // 0: unknown
    int64_t answer() const { return std::max<int64_t>(context / 4, 1024); }
};

Server server_of(const ServeOptions& o) {
    const bool everywhere = o.host == "0.0.0.0" || o.host == "::";
    const std::string host = everywhere                              ? "127.0.0.1"
                             : o.host.find(':') != std::string::npos ? "[" + o.host + "]"
                                                                     : o.host;
    const std::string address = fmt::format("http://{}:{}", host, o.port);
    return {address, address + "/v1", o.keys.empty() ? "none" : o.keys.front(),
            o.aliases.empty() ? "quern" : o.aliases.front().first, o.context};
}

/// For a shell, whatever is in it.
std::string quoted(const std::string& text) {
    std::string out = "'";
    for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

/// A string of TOML, YAML or JSON.
std::string literal(const std::string& text) { return ordered_json(text).dump(); }

std::string exports(std::initializer_list<std::pair<const char*, std::string>> variables) {
    std::string out;
    for (const auto& [name, value] : variables) out += fmt::format("export {}={}\n", name, quoted(value));
    return out;
}

std::string claude(const Server& s) {
    std::string out = "# Claude Code: eval \"$(quern serve ... --print-config claude)\" && claude\n" +
                      exports({{"ANTHROPIC_BASE_URL", s.address},
                               {"ANTHROPIC_AUTH_TOKEN", s.key},
                               {"ANTHROPIC_API_KEY", ""},
                               {"ANTHROPIC_MODEL", s.model},
                               {"ANTHROPIC_DEFAULT_OPUS_MODEL", s.model},
                               {"ANTHROPIC_DEFAULT_SONNET_MODEL", s.model},
                               {"ANTHROPIC_DEFAULT_HAIKU_MODEL", s.model},
                               {"CLAUDE_CODE_SUBAGENT_MODEL", s.model},
                               {"CLAUDE_CODE_ATTRIBUTION_HEADER", "0"},
                               {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"}});
    if (s.context > 0)
        out += exports({{"CLAUDE_CODE_AUTO_COMPACT_WINDOW", std::to_string(s.context)},
                        {"CLAUDE_CODE_MAX_OUTPUT_TOKENS", std::to_string(s.answer())}});
    return out;
}

std::string codex(const Server& s) {
    std::string out = "# ~/.codex/config.toml\n";
    out += fmt::format("model = {}\nmodel_provider = \"quern\"\n", literal(s.model));
    if (s.context > 0) out += fmt::format("model_context_window = {}\n", s.context);
    out += fmt::format(
        "\n[model_providers.quern]\nname = \"quern\"\nbase_url = {}\nwire_api = \"responses\"\n"
        "supports_websockets = false\n",
        literal(s.api));
    if (s.key != "none")
        out += fmt::format("http_headers = {{ Authorization = {} }}\n", literal("Bearer " + s.key));
    return out;
}

std::string opencode(const Server& s) {
    ordered_json model = {{"name", s.model}, {"reasoning", true}, {"tool_call", true}};
    if (s.context > 0) model["limit"] = {{"context", s.context}, {"output", s.answer()}};
    const ordered_json provider = {{"npm", "@ai-sdk/openai-compatible"},
                                   {"name", "quern"},
                                   {"options", {{"baseURL", s.api}, {"apiKey", s.key}}},
                                   {"models", {{s.model, model}}}};
    return ordered_json{{"$schema", "https://opencode.ai/config.json"},
                        {"provider", {{"quern", provider}}},
                        {"model", "quern/" + s.model}}
               .dump(2) +
           "\n";
}

std::string openwebui(const Server& s) {
    return "# Open WebUI: the environment of `open-webui serve`, or -e of its container\n" +
           exports({{"OPENAI_API_BASE_URL", s.api},
                    {"OPENAI_API_KEY", s.key},
                    {"DEFAULT_MODELS", s.model},
                    {"ENABLE_OLLAMA_API", "false"}});
}

std::string cline(const Server& s) {
    ordered_json out = {{"apiProvider", "openai"},
                        {"openAiBaseUrl", s.api},
                        {"openAiApiKey", s.key},
                        {"openAiModelId", s.model}};
    ordered_json info = {{"supportsImages", false}, {"supportsPromptCache", true}};
    if (s.context > 0) info.update({{"contextWindow", s.context}, {"maxTokens", s.answer()}});
    out["openAiModelInfo"] = info;
    return out.dump(2) + "\n";
}

std::string continue_dev(const Server& s) {
    std::string out = "# ~/.continue/config.yaml\nname: quern\nversion: 1.0.0\nschema: v1\nmodels:\n";
    out += fmt::format(
        "  - name: {0}\n    provider: openai\n    model: {0}\n    apiBase: {1}\n    apiKey: {2}\n",
        literal(s.model), literal(s.api), literal(s.key));
    out += "    roles: [chat, edit, apply]\n    capabilities: [tool_use]\n";
    if (s.context > 0)
        out += fmt::format("    defaultCompletionOptions:\n      contextLength: {}\n      maxTokens: {}\n",
                           s.context, s.answer());
    return out;
}

std::string zed(const Server& s) {
    ordered_json model = {{"name", s.model}, {"display_name", s.model}, {"max_tokens", 32768}};
    if (s.context > 0) model.update({{"max_tokens", s.context}, {"max_output_tokens", s.answer()}});
    model["capabilities"] = {
        {"tools", true}, {"images", false}, {"parallel_tool_calls", true}, {"prompt_cache_key", false}};
    const ordered_json provider = {{"api_url", s.api}, {"available_models", ordered_json::array({model})}};
    return ordered_json{{"language_models", {{"openai_compatible", {{"quern", provider}}}}}}.dump(2) + "\n";
}

}  // namespace

std::string client_config(const std::string& client, const ServeOptions& options) {
    const Server s = server_of(options);
    if (client == "claude") return claude(s);
    if (client == "codex") return codex(s);
    if (client == "opencode") return opencode(s);
    if (client == "openwebui") return openwebui(s);
    if (client == "cline") return cline(s);
    if (client == "continue") return continue_dev(s);
    if (client == "zed") return zed(s);
    FAIL(usage, "--print-config: expected {}, found '{}'", kClientNames, printable(client));
}

}  // namespace quern
