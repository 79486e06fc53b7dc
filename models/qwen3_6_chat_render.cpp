#include <algorithm>
#include <array>

#include "ggml-like/check.h"
#include "models/python_text.h"
#include "models/qwen3_6_chat.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

constexpr std::array<std::string_view, 8> kMarkers = {"<|im_start|>",    "<|im_end|>",      "<think>",
                                                      "</think>",        "<tool_call>",     "</tool_call>",
                                                      "<tool_response>", "</tool_response>"};

constexpr std::string_view kToolsIntro = "# Tools\n\nYou have access to the following functions:\n\n<tools>";

// The wording is part of the format: the model was trained on exactly these bytes.
constexpr std::string_view kToolsManual =
    "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\n"
    "multiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be "
    "nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function "
    "call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge "
    "and do not tell the user about function calls\n"
    "</IMPORTANT>";

constexpr std::string_view kHighEffort =
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, "
    "consider plausible alternatives, and prioritize correctness, consistency, and clarity in the final "
    "answer.";
constexpr std::string_view kLowEffort =
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion "
    "without unnecessary elaboration.";

/// What the versions of the format do differently.
struct Version {
    bool python_arguments = false;  // of tools: True, False and None
    bool preserves_thinking = false;
    bool thinking_in_content = true;  // of an assistant's message without reasoning
    bool states_effort = false;
};

/// Collects segments, plain text joined.
class SegmentWriter {
  public:
    /// Words of the format: markers in it are control tokens.
    void format(std::string_view text) {
        while (!text.empty()) {
            const auto [at, marker] = first_marker(text);
            plain(text.substr(0, at));
            if (at == text.size()) return;
            segments_.push_back({std::string(marker), true});
            text.remove_prefix(at + marker.size());
        }
    }

    /// Words of people, tools and the model: text, whatever they say.
    void plain(std::string_view text) {
        if (text.empty()) return;
        if (segments_.empty() || segments_.back().control) segments_.push_back({});
        segments_.back().text += text;
    }

    /// A message's words, stripped, and images between them.
    void content(const Message& message) {
        if (message.images.empty()) return plain(python_strip(message.content));
        const std::string_view text = message.content;
        size_t at = 0;
        for (const MessageImage& image : message.images) {
            const std::string_view before = text.substr(at, image.at - at);
            plain(at == 0 && &image == &message.images.front() ? python_lstrip(before) : before);
            at = image.at;
            this->image(image);
        }
        plain(python_rstrip(text.substr(at)));
    }

    size_t size() const { return segments_.size(); }
    std::vector<PromptSegment> take() { return std::move(segments_); }

  private:
    void image(const MessageImage& image) {
        for (const FramePair& pair : image.pairs) {  // as transformers to 5.9: no marks around all of them
            plain(pair.time);
            marked("<|video_pad|>", pair.image);
        }
        if (!image.pairs.empty()) return;
        if (image.image == nullptr) FAIL(usage, "{}: the image is not read here", image.where);
        marked("<|image_pad|>", image.image);
    }

    void marked(const char* token, const ImagePtr& image) {
        segments_.push_back({"<|vision_start|>", true});
        segments_.push_back({token, true, image});
        segments_.push_back({"<|vision_end|>", true});
    }

    static std::pair<size_t, std::string_view> first_marker(std::string_view text) {
        for (size_t at = text.find('<'); at != text.npos; at = text.find('<', at + 1))
            for (std::string_view marker : kMarkers)
                if (text.substr(at, marker.size()) == marker) return {at, marker};
        return {text.size(), {}};
    }

    std::vector<PromptSegment> segments_;
};

/// One assistant turn, taken apart.
struct AssistantText {
    std::string_view reasoning, content;
};

std::string_view strip_line_feeds(std::string_view text, bool front, bool back) {
    while (front && text.starts_with('\n')) text.remove_prefix(1);
    while (back && text.ends_with('\n')) text.remove_suffix(1);
    return text;
}

AssistantText split_assistant(const Message& message, const Version& version) {
    static constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    const std::string_view content = python_strip(message.content);
    if (message.reasoning) return {python_strip(*message.reasoning), content};
    if (!version.thinking_in_content) return {{}, content};
    const size_t close = content.find(kClose);
    if (close == content.npos) return {{}, content};
    std::string_view reasoning = strip_line_feeds(content.substr(0, close), false, true);
    if (const size_t open = reasoning.rfind(kOpen); open != reasoning.npos)
        reasoning.remove_prefix(open + kOpen.size());
    const std::string_view rest = content.substr(content.rfind(kClose) + kClose.size());
    return {python_strip(reasoning), strip_line_feeds(rest, true, false)};
}

bool is_system(const Message& message) { return message.role == "system" || message.role == "developer"; }

/// Tool results that a client sent as a user message are no new query.
bool is_query(const Message& message) {
    if (message.role != "user") return false;
    const std::string_view content = python_strip(message.content);
    return !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"));
}

class Renderer {
  public:
    Renderer(const Version& version, std::span<const Message> messages, const ordered_json& tools,
             const ChatOptions& options)
        : version_(version), tools_(tools), options_(options) {
        if (messages.empty()) FAIL(usage, "the conversation has no messages; send at least one");
        for (const Message& message : messages) sort_in(message);
        if (!has_query_) after_query_ = turns_.size();
    }

    RenderedPrompt render() {
        system_block();
        for (size_t i = 0; i < turns_.size(); ++i) turn(i);
        if (options_.add_generation_prompt)
            out_.format(options_.thinking ? "<|im_start|>assistant\n<think>\n"
                                          : "<|im_start|>assistant\n<think>\n\n</think>\n\n");
        prompt_.segments = out_.take();
        prompt_.thinking_open = options_.add_generation_prompt && options_.thinking;
        return std::move(prompt_);
    }

  private:
    void sort_in(const Message& message) {
        if (is_system(message) && !turns_.empty()) {  // said later: it stays where it is
            if (!python_strip(message.content).empty()) turns_.push_back(&message);
            return;
        }
        if (is_system(message)) {
            const std::string_view content = python_strip(message.content);
            if (!system_.empty() && !content.empty()) system_ += "\n\n";
            system_ += content;
            has_system_ = true;
            return;
        }
        if (message.role != "user" && message.role != "assistant" && message.role != "tool")
            FAIL(usage, "message role '{}' is not known; use system, developer, user, assistant or tool",
                 message.role.substr(0, 40));
        turns_.push_back(&message);
        if (!is_query(message)) return;
        has_query_ = true;
        after_query_ = turns_.size();
    }

    void system_block() {
        const bool has_tools = tools_.is_array() && !tools_.empty();
        const std::string_view effort = effort_text();
        // Qwen3.8 leaves out a system turn that would be empty.
        if (!has_tools && effort.empty() && (!has_system_ || (version_.states_effort && system_.empty())))
            return;
        out_.format("<|im_start|>system\n");
        out_.format(effort);
        if (!effort.empty() && (has_tools || !system_.empty())) out_.format("\n\n");
        if (has_tools) {
            out_.format(kToolsIntro);
            for (const ordered_json& tool : tools_) {
                out_.format("\n");
                out_.plain(python_json(tool));
            }
            out_.format("\n</tools>");
            out_.format(kToolsManual);
            if (!system_.empty()) out_.format("\n\n");
        }
        out_.plain(system_);
        end_turn();
    }

    std::string_view effort_text() const {
        if (!version_.states_effort || !options_.thinking) return {};
        switch (options_.effort) {
            case ReasoningEffort::low:
                return kLowEffort;
            case ReasoningEffort::medium:
                return {};
            case ReasoningEffort::unset:
            case ReasoningEffort::high:
                return kHighEffort;
        }
        return {};
    }

    void turn(size_t i) {
        const Message& message = *turns_[i];
        if (message.role == "tool") return tool_result(i);
        if (message.role == "assistant") return assistant(i);
        out_.format(is_system(message) ? "<|im_start|>system\n" : "<|im_start|>user\n");
        out_.content(message);
        end_turn();
    }

    void assistant(size_t i) {
        const AssistantText text = split_assistant(*turns_[i], version_);
        out_.format("<|im_start|>assistant\n");
        if (options_.preserve_thinking.value_or(version_.preserves_thinking) || i >= after_query_) {
            out_.format("<think>\n");
            out_.plain(text.reasoning);
            out_.format("\n</think>\n\n");
        }
        out_.plain(text.content);
        bool follows = !python_strip(text.content).empty();
        bool first = true;
        for (const ToolCall& call : turns_[i]->tool_calls) {
            if (follows) out_.format(first ? "\n\n" : "\n");
            tool_call(call);
            follows = true;
            first = false;
        }
        end_turn();
    }

    void tool_call(const ToolCall& call) {
        out_.format("<tool_call>\n<function=");
        out_.plain(call.name);
        out_.format(">\n");
        const auto arguments = parse_ordered_json(call.arguments);
        if (arguments && arguments->is_object()) {
            for (const auto& [key, value] : arguments->items())
                parameter(key, value.is_string() ? value.get_ref<const std::string&>() : argument(value));
        } else if (!python_strip(call.arguments).empty() && !(arguments && arguments->is_null())) {
            parameter("arguments", call.arguments);
        }
        out_.format("</function>\n</tool_call>");
    }

    std::string argument(const ordered_json& value) const {
        if (version_.python_arguments && value.is_boolean()) return value.get<bool>() ? "True" : "False";
        if (version_.python_arguments && value.is_null()) return "None";
        return python_json(value);
    }

    void parameter(std::string_view key, std::string_view value) {
        out_.format("<parameter=");
        out_.plain(key);
        out_.format(">\n");
        out_.plain(value);
        out_.format("\n</parameter>\n");
    }

    /// Results in a row share one user turn.
    void tool_result(size_t i) {
        const bool opens = i == 0 ? has_system_ : turns_[i - 1]->role != "tool";
        const bool closes = i + 1 == turns_.size() || turns_[i + 1]->role != "tool";
        if (opens)
            out_.format("<|im_start|>user");
        else if (i == 0)
            prompt_.boundaries.clear();  // the reference writes no header here: text joins that of the tools
        out_.format("\n<tool_response>\n");
        out_.content(*turns_[i]);
        out_.format("\n</tool_response>");
        if (closes) end_turn();
    }

    void end_turn() {
        out_.format("<|im_end|>\n");
        prompt_.boundaries.push_back(out_.size());
    }

    const Version version_;
    const ordered_json& tools_;
    const ChatOptions& options_;
    std::vector<const Message*> turns_;  // all but system messages
    std::string system_;
    bool has_system_ = false, has_query_ = false;
    size_t after_query_ = 0;  // turns from here on come after the last query
    SegmentWriter out_;
    RenderedPrompt prompt_;
};

}  // namespace

RenderedPrompt render_qwen3_5_chat(std::span<const Message> messages, const ordered_json& tools,
                                   const ChatOptions& options) {
    return Renderer({.python_arguments = true}, messages, tools, options).render();
}

RenderedPrompt render_qwen3_6_chat(std::span<const Message> messages, const ordered_json& tools,
                                   const ChatOptions& options) {
    return Renderer({}, messages, tools, options).render();
}

RenderedPrompt render_qwen3_8_chat(std::span<const Message> messages, const ordered_json& tools,
                                   const ChatOptions& options) {
    return Renderer({.preserves_thinking = true, .thinking_in_content = false, .states_effort = true},
                    messages, tools, options)
        .render();
}

}  // namespace quern
