#include "tools/serve/generation.h"

#include <fmt/format.h>

#include "ggml-like/error.h"
#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/common/images/read_images.h"
#include "tools/common/messages.h"
#include "tools/common/speculation_flags.h"
#include "tools/serve/api_error.h"
#include "tools/serve/sampling_fields.h"
#include "tools/serve/structure_fields.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr int kMaxChoices = 8, kMaxLogprobs = 20;
constexpr size_t kMaxPrompts = 128;
constexpr size_t kMaxStops = 256, kLongestStop = 4096;

std::vector<std::string> read_stops(Fields& f) {
    const ordered_json* stop = f.value("stop");
    if (stop == nullptr) return {};
    const ordered_json list = stop->is_array() ? *stop : ordered_json::array({*stop});
    if (list.size() > kMaxStops)
        throw FieldError("stop", fmt::format("stop: {} texts; at most {} are taken", list.size(), kMaxStops));
    std::vector<std::string> out;
    for (const ordered_json& text : list) {
        if (!text.is_string() || text.get_ref<const std::string&>().empty() ||
            text.get_ref<const std::string&>().size() > kLongestStop)
            throw wrong_value("stop", fmt::format("texts of 1 to {} bytes", kLongestStop), text);
        out.push_back(text.get<std::string>());
    }
    return out;
}

/// Tokens of an answer at most; -1: no limit.
std::optional<int64_t> read_limit(Fields& f, const char* name, int64_t fewest) {
    const ordered_json* value = f.value(name);
    if (value == nullptr) return {};
    const bool whole = value->is_number_unsigned() ? value->get<uint64_t>() <= uint64_t{INT64_MAX}
                                                   : value->is_number_integer();
    const int64_t n = whole ? value->get<int64_t>() : 0;
    if (!whole || (n < fewest && n != -1))
        throw wrong_value(name, fmt::format("a whole number of at least {}, or -1 for no limit", fewest),
                          *value);
    return n < 0 ? INT64_MAX : n;
}

/// {"type": "lookup", "n": 4}
DraftOptions read_drafts(Fields& f) {
    DraftOptions out;
    const ordered_json* wanted = f.object("speculative");
    if (wanted == nullptr) return out;
    Fields inner(*wanted, "speculative");
    try {
        if (const auto type = inner.string("type")) out.kind = parse_drafter(*type, "speculative.type");
    } catch (const FieldError&) {
        throw;
    } catch (const Error& error) {
        throw FieldError("speculative.type", error.what());
    }
    out.most = inner.integer("n", 0, INT64_MAX).value_or(out.most);
    if (const auto names = inner.unknown(); !names.empty())
        throw FieldError(inner.full(names[0]),
                         inner.full(names[0]) + " is not supported; there are type and n");
    return out;
}

/// What a client calls its conversation: prompt_cache_key, else metadata.user_id, which has the session in it. A number for
/// it; 0: nothing.
uint64_t conversation_of(Fields& f) {
    const ordered_json* name = f.value("prompt_cache_key");
    const ordered_json* metadata = f.value("metadata");
    if (name == nullptr && metadata != nullptr && metadata->is_object() && metadata->contains("user_id"))
        name = &metadata->at("user_id");
    if (name == nullptr || !name->is_string() || name->get_ref<const std::string&>().empty()) return 0;
    return std::hash<std::string>{}(name->get_ref<const std::string&>()) | 1;
}

/// A tool as tool_choice names it: {"function": {"name"}} or {"name"}.
std::string named_tool(const ordered_json& choice, const std::string& where, const AnswerRules& rules) {
    Fields f(choice, where);
    const ordered_json* function = f.object("function");
    const std::string name = function != nullptr
                                 ? Fields(*function, f.full("function")).string("name").value_or("")
                                 : f.string("name").value_or("");
    for (const ordered_json& tool : rules.tools)
        if (tool["function"]["name"] == name) return name;
    throw FieldError("tool_choice",
                     fmt::format("tool_choice names '{}', which is not in tools", printable(name)));
}

/// {"mode", "tools"}: the names go to the rules.
std::string allowed_tools(Fields f, AnswerRules& rules) {
    const ordered_json* list = f.list("tools");
    if (list == nullptr || list->empty()) throw FieldError("tool_choice", f.full("tools") + " is missing");
    for (size_t i = 0; i < list->size(); ++i)
        rules.call_names.push_back(named_tool((*list)[i], fmt::format("{}[{}]", f.full("tools"), i), rules));
    return f.string("mode").value_or("auto");
}

/// auto, none, required, {"type": one of these}, {"type": "function", ...} or {"type": "allowed_tools", ...}, the last in
/// the form of the chat or of the responses API.
void read_tool_choice(Fields& f, AnswerRules& rules) {
    if (const auto parallel = f.boolean("parallel_tool_calls")) rules.parallel_calls = *parallel;
    const ordered_json* choice = f.value("tool_choice");
    std::string mode = "auto";
    if (choice != nullptr && choice->is_object()) {
        Fields inner(*choice, "tool_choice");
        mode = inner.string("type").value_or("function");
        if (mode == "allowed_tools") {
            const ordered_json* nested = inner.object("allowed_tools");
            mode = allowed_tools(nested != nullptr ? Fields(*nested, inner.full("allowed_tools")) : inner,
                                 rules);
        } else if (mode == "function") {
            rules.call_names = {named_tool(*choice, "tool_choice", rules)};
            mode = "required";
        }
    } else if (choice != nullptr) {
        mode = f.string("tool_choice").value_or("");
    }
    if (mode == "none")
        rules.calls = AnswerRules::Calls::none;
    else if (mode == "required")
        rules.calls = AnswerRules::Calls::required;
    else if (mode != "auto")
        throw wrong_value("tool_choice", "auto, none, required, a function of tools or allowed_tools", mode);
    if (rules.calls == AnswerRules::Calls::required && rules.tools.empty())
        throw FieldError("tool_choice", "tool_choice demands a call, but there are no tools");
    if (rules.calls != AnswerRules::Calls::none)
        rules.call_grammar = Grammar::calls(rules.tools, rules.call_names, rules.parallel_calls);
}

/// Whether the last message, an assistant's, is the beginning of the answer. It is unless the request says otherwise
/// (continue_final_message false, or add_generation_prompt true, as vLLM has them; prefix on the message, as DeepSeek)
/// or the message ends with calls.
bool continues(Fields& f, const std::vector<Message>& messages, bool prefix) {
    const auto wanted = f.boolean("continue_final_message");
    const auto next = f.boolean("add_generation_prompt");
    const Message& last = messages.back();
    const bool begun = !last.content.empty() || (last.reasoning && !last.reasoning->empty()) || prefix;
    const bool possible = last.role == "assistant" && last.tool_calls.empty() && begun;
    if ((wanted.value_or(false) || prefix) && !possible)
        throw FieldError("continue_final_message",
                         "the message to go on with must be the last one, an assistant's, and without calls");
    return possible && wanted.value_or(prefix || !next.value_or(false));
}

/// Takes the end of the last turn away. What is left open is the thinking if there is nothing else.
void reopen(RenderedPrompt& prompt, const Message& last) {
    auto& segments = prompt.segments;
    const auto drop = [&](size_t count) {
        segments.resize(segments.size() - std::min(count, segments.size()));
    };
    drop(2);  // the marker of the end, a line feed
    const bool thinks = last.content.empty() && last.reasoning && !last.reasoning->empty();
    if (thinks && segments.size() > 2 && segments[segments.size() - 2].control) {
        drop(2);  // the same of the thinking
        prompt.thinking_open = true;
    }
    while (!prompt.boundaries.empty() && prompt.boundaries.back() > segments.size())
        prompt.boundaries.pop_back();
}

/// For models that are not told in words, too: tokens of thinking; -1: no limit.
int64_t budget_of_effort(const std::string& effort) {
    if (effort == "none") return 0;
    if (effort == "minimal") return 512;
    if (effort == "low") return 2048;
    if (effort == "medium") return 8192;
    if (parse_effort(effort) == ReasoningEffort::high) return -1;
    throw wrong_value("reasoning_effort", fmt::format("none, {}", kEffortNames), effort);
}

}  // namespace

const Alias& RequestReader::alias(const std::string& name) const {
    for (const Alias& a : aliases_)
        if (a.name == name) return a;
    if (strict_ && !name.empty())
        throw ApiError(404, "model_not_found",
                       fmt::format("there is no model '{}'; /v1/models lists them", name), "model");
    return aliases_.front();
}

RequestReader::Thinking RequestReader::thinking(Fields& f, const Settings& defaults) const {
    Thinking t{.on = defaults.thinking, .budget = defaults.reasoning_budget};
    if (const auto effort = f.string("reasoning_effort")) {
        t.budget = budget_of_effort(*effort);
        t.effort = parse_effort(*effort).value_or(ReasoningEffort::unset);
    }
    for (const char* name :
         {"thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"})
        if (const auto budget = f.integer(name, -1, INT64_MAX)) t.budget = *budget;
    if (const auto on = f.boolean("enable_thinking")) t.on = *on;
    t.preserve = f.boolean("preserve_thinking");
    if (const ordered_json* thinking = f.object("thinking")) {
        Fields inner(*thinking, "thinking");
        t.on = inner.string("type").value_or("enabled") != "disabled";
        if (const auto budget = inner.integer("budget_tokens", 0, INT64_MAX)) t.budget = *budget;
    }
    if (const ordered_json* kwargs = f.object("chat_template_kwargs")) {
        Fields inner(*kwargs, "chat_template_kwargs");
        t.on = inner.boolean("enable_thinking").value_or(t.on);
        if (const auto preserve = inner.boolean("preserve_thinking")) t.preserve = *preserve;
        if (const auto effort = inner.string("reasoning_effort")) {
            t.effort = parse_effort(*effort).value_or(ReasoningEffort::unset);
            if (t.effort == ReasoningEffort::unset)
                throw wrong_value(inner.full("reasoning_effort"), kEffortNames, *effort);
        }
        for (const std::string& name : inner.unknown()) f.note_unknown(inner.full(name));
    }
    if (t.budget == 0) t.on = false;
    return t;
}

GenerationRequest RequestReader::common(Fields& f, int64_t fewest_tokens) const {
    GenerationRequest out;
    const Alias& a = alias(f.string("model").value_or(""));
    out.model = a.name;
    out.sampling = a.settings.sampling;
    out.max_tokens = a.settings.max_tokens;
    read_sampling(f, out.sampling, !a.settings.random_seed, model_.info().vocab);
    for (const char* name : {"max_tokens", "max_completion_tokens", "n_predict"}) {
        if (const auto n = read_limit(f, name, fewest_tokens)) out.max_tokens = *n;
    }
    out.rules.stops = read_stops(f);
    out.choices = static_cast<int>(f.integer("n", 1, kMaxChoices).value_or(1));
    out.stream = f.boolean("stream").value_or(false);
    if (const ordered_json* options = f.object("stream_options"))
        out.include_usage = Fields(*options, "stream_options").boolean("include_usage").value_or(false);
    out.use_cache = f.boolean("cache_prompt").value_or(true);
    out.conversation = conversation_of(f);
    out.drafts = read_drafts(f);
    out.return_progress = f.boolean("return_progress").value_or(false) && out.stream;
    out.timings_per_token = f.boolean("timings_per_token").value_or(false) && out.stream;
    f.integer("id_slot", -1, INT32_MAX);  // any slot finds any kept state
    out.ignore_eos = f.boolean("ignore_eos").value_or(false);
    f.ignore({"user", "store", "service_tier", "prompt_cache_retention", "safety_identifier", "verbosity",
              "cache_salt", "priority"});
    f.refuse({"functions", "function_call", "audio", "web_search_options", "prediction"});
    return out;
}

int64_t GenerationRequest::prompt_tokens() const {
    int64_t sum = 0;
    for (const auto& prompt : prompts) sum += static_cast<int64_t>(prompt.size());
    return sum;
}

std::vector<std::string> GenerationRequest::not_enforced() const {
    std::vector<std::string> out;
    for (const auto& grammar : {rules.grammar, rules.call_grammar})
        if (grammar != nullptr)
            out.insert(out.end(), grammar->not_enforced().begin(), grammar->not_enforced().end());
    return out;
}

void RequestReader::settle(Fields& f, std::vector<std::string>* ignored) const {
    const auto names = f.unknown();
    if (strict_ && !names.empty())
        throw FieldError(names[0], fmt::format("'{}' is no field that this server knows", names[0]),
                         "unknown_parameter");
    if (ignored != nullptr) *ignored = names;
}

GenerationRequest RequestReader::chat(const ChatBody& chat, std::vector<std::string>* ignored) const {
    try {
        GenerationRequest out = read_chat(chat.body, ignored);
        out.kinds = chat.kinds;
        if (ignored != nullptr) ignored->insert(ignored->end(), chat.dropped.begin(), chat.dropped.end());
        return out;
    } catch (const FieldError& error) {
        throw as_named(at_origin(error, chat.origins), chat.names);
    }
}

GenerationRequest RequestReader::read_chat(const ordered_json& body,
                                           std::vector<std::string>* ignored) const {
    Fields f(body);
    GenerationRequest out = common(f, 1);
    if (const ordered_json* tools = f.list("tools")) out.rules.tools = read_tools(*tools);
    read_tool_choice(f, out.rules);
    out.rules.grammar = read_structure(f);
    if (f.boolean("logprobs").value_or(false))
        out.rules.top_logprobs = static_cast<int>(f.integer("top_logprobs", 0, kMaxLogprobs).value_or(0));
    else if (f.integer("top_logprobs", 0, kMaxLogprobs).value_or(0) > 0)
        throw FieldError("top_logprobs", "top_logprobs needs logprobs: true");
    if (const ordered_json* modalities = f.list("modalities");
        modalities != nullptr && *modalities != ordered_json{"text"})
        throw FieldError("modalities", fmt::format("modalities must be [\"text\"], found {}",
                                                   printable(dump(*modalities))));
    const ordered_json* messages = f.list("messages");
    if (messages == nullptr) throw FieldError("messages", "messages is missing");
    const Thinking think = thinking(f, alias(out.model).settings);
    const RenderedPrompt prompt = render(f, *messages, out.rules.tools, think.options());
    std::vector<size_t> boundaries;
    out.prompts = {encode_prompt(prompt, *model_.tokenizer(), &boundaries)};
    out.boundaries.assign(boundaries.begin(), boundaries.end());
    out.images = prompt.images();
    out.rules.thinking_open = prompt.thinking_open;
    out.rules.thinking_budget = think.budget;
    settle(f, ignored);
    return out;
}

RenderedPrompt RequestReader::render(Fields& f, const ordered_json& list, const ordered_json& tools,
                                     ChatOptions options) const {
    std::vector<Message> messages = read_messages(list);
    read_images(messages, model_, sizes_);
    const ordered_json& last = list.back();
    const bool go_on = continues(f, messages, last.contains("prefix") && last["prefix"] == true);
    options.add_generation_prompt = !go_on && f.boolean("add_generation_prompt").value_or(true);
    RenderedPrompt prompt = model_.chat().render(messages, tools, options);
    if (go_on) reopen(prompt, messages.back());
    return prompt;
}

RenderedPrompt RequestReader::render(const ordered_json& body) const {
    Fields f(body);
    const ordered_json* messages = f.list("messages");
    if (messages == nullptr) throw FieldError("messages", "messages is missing");
    const ordered_json* tools = f.list("tools");
    return render(f, *messages, tools != nullptr ? read_tools(*tools) : ordered_json(),
                  thinking(f, aliases_.front().settings).options());
}

/// One text, one list of token ids, or a list of such.
std::vector<std::vector<int32_t>> RequestReader::prompts(const ordered_json& value) const {
    const auto one = [&](const ordered_json& prompt) {
        if (prompt.is_string())
            return model_.tokenizer()->encode(prompt.get<std::string>(), Tokenizer::Markers::control);
        std::vector<int32_t> ids;
        if (!prompt.is_array() || (!prompt.empty() && !prompt[0].is_number()))
            throw wrong_value("prompt", "a text, a list of token ids, or a list of such",
                              prompt.is_array() ? prompt[0] : prompt);
        for (const ordered_json& id : prompt) {
            if (!id.is_number_integer() || id < 0 || id >= model_.info().vocab)
                throw wrong_value("prompt", fmt::format("token ids from 0 to {}", model_.info().vocab - 1),
                                  id);
            ids.push_back(id.get<int32_t>());
        }
        return ids;
    };
    std::vector<std::vector<int32_t>> out;
    if (value.is_array() && !value.empty() && !value[0].is_number()) {
        if (value.size() > kMaxPrompts)
            throw FieldError(
                "prompt", fmt::format("prompt: {} at once at most, there are {}", kMaxPrompts, value.size()));
        for (const ordered_json& prompt : value) out.push_back(one(prompt));
    } else {
        out.push_back(one(value));
    }
    for (const auto& ids : out)
        if (ids.empty()) throw FieldError("prompt", "prompt is empty");
    return out;
}

GenerationRequest RequestReader::completion(const ordered_json& body,
                                            std::vector<std::string>* ignored) const {
    Fields f(body);
    GenerationRequest out = common(f, 0);
    out.rules.chat = false;
    out.rules.grammar = read_structure(f);
    if (const auto n = f.integer("logprobs", 0, kMaxLogprobs)) out.rules.top_logprobs = static_cast<int>(*n);
    f.ignore({"best_of"});
    f.refuse({"suffix"});
    const ordered_json* prompt = f.value("prompt");
    if (prompt == nullptr) throw FieldError("prompt", "prompt is missing");
    out.prompts = prompts(*prompt);
    if (f.boolean("echo").value_or(false)) {
        for (const auto& ids : out.prompts) out.echo.push_back(model_.tokenizer()->decode(ids, false));
        out.rules.prompt_logprobs = out.rules.top_logprobs >= 0;
    }
    settle(f, ignored);
    return out;
}

}  // namespace quern
