// GenerationRequest: what a request of any API asks for, checked, its prompts as token ids.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "models/chat_format.h"
#include "models/model.h"
#include "tools/common/fields.h"
#include "tools/common/settings.h"
#include "tools/engine/answer_reader.h"
#include "tools/engine/request.h"
#include "tools/serve/chat_body.h"

namespace quern {

/// A name under which the model is served, and the settings of requests to it.
struct Alias {
    std::string name;
    Settings settings;
};

struct GenerationRequest {
    std::string model;                          // the name to answer with
    std::vector<std::vector<int32_t>> prompts;  // completions: one or more
    std::vector<ImagePtr> images;               // of a chat's prompt
    std::vector<int64_t> boundaries;
    Sampling sampling;
    int64_t max_tokens = std::numeric_limits<int64_t>::max();
    bool ignore_eos = false;
    AnswerRules rules;
    int choices = 1;  // of each prompt
    bool stream = false;
    bool include_usage = false;
    bool use_cache = true;
    uint64_t conversation = 0;  // Request::conversation
    DraftOptions drafts;
    bool return_progress = false, timings_per_token = false;  // of a stream
    std::vector<std::string>
        echo;  // completions: texts of the prompts, if they are repeated before the answers

    ToolKinds kinds;

    int answers() const { return choices * static_cast<int>(prompts.size()); }
    const std::vector<int32_t>& prompt_of(int answer) const {
        return prompts[static_cast<size_t>(answer / choices)];
    }
    int64_t prompt_tokens() const;
    /// Keywords of schemas that say more than is enforced.
    std::vector<std::string> not_enforced() const;
};

/// Reads requests; fields that the APIs share are read in one place.
class RequestReader {
  public:
    /// `sizes`: of images, if the model reads them.
    RequestReader(const Model& model, const std::vector<Alias>& aliases, bool strict, const ImageSizes& sizes)
        : model_(model), aliases_(aliases), strict_(strict), sizes_(sizes) {}

    /// `ignored`, if given: fields and parts that have no effect.
    GenerationRequest chat(const ChatBody& chat, std::vector<std::string>* ignored) const;
    GenerationRequest completion(const nlohmann::ordered_json& body, std::vector<std::string>* ignored) const;

    /// The alias of this name; for an unknown name the first one, or ApiError(404) if strict.
    const Alias& alias(const std::string& name) const;
    /// The conversation of a chat request, or of /apply-template, as a prompt.
    RenderedPrompt render(const nlohmann::ordered_json& body) const;

  private:
    struct Thinking {
        bool on = true;
        std::optional<bool> preserve = {};
        ReasoningEffort effort = ReasoningEffort::unset;
        int64_t budget = -1;

        ChatOptions options() const {
            return {.thinking = on, .preserve_thinking = preserve, .effort = effort};
        }
    };
    RenderedPrompt render(Fields& fields, const nlohmann::ordered_json& messages,
                          const nlohmann::ordered_json& tools, ChatOptions options) const;
    GenerationRequest read_chat(const nlohmann::ordered_json& body, std::vector<std::string>* ignored) const;
    GenerationRequest common(Fields& fields, int64_t fewest_tokens) const;
    std::vector<std::vector<int32_t>> prompts(const nlohmann::ordered_json& value) const;
    Thinking thinking(Fields& fields, const Settings& defaults) const;
    void settle(Fields& fields, std::vector<std::string>* ignored) const;

    const Model& model_;
    const std::vector<Alias>& aliases_;
    bool strict_;
    ImageSizes sizes_;
};

}  // namespace quern
