// llama.cpp's own /completion and /infill.
#include "models/tokenizer.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

class LlamaFormat final : public AnswerFormat {
  public:
    explicit LlamaFormat(const GenerationRequest& request) : model_(request.model) {}

    /// A list if there were several prompts or choices.
    ordered_json whole(const std::vector<Choice>& choices) override {
        ordered_json out = ordered_json::array();
        for (size_t i = 0; i < choices.size(); ++i) {
            ordered_json one = part(static_cast<int>(i), choices[i].content);
            finish(one, choices[i]);
            out.push_back(std::move(one));
        }
        return out.size() == 1 ? out[0] : out;
    }
    std::string begin() override { return {}; }
    std::string delta(int choice, const AnswerDelta& d) override {
        return d.content.empty() ? std::string() : event(part(choice, d.content));
    }
    std::string progress(int choice, const Progress& p) override {
        if (p.answer_tokens > 0) return {};
        ordered_json out = part(choice, "");
        out["prompt_progress"] = {{"total", p.prompt_tokens},
                                  {"cache", p.cached_tokens},
                                  {"processed", p.prompt_done},
                                  {"time_ms", p.timing.prefill_seconds * 1e3}};
        return event(out);
    }
    std::string end(int choice, const Choice& all) override {
        ordered_json out = part(choice, "");
        finish(out, all);
        return event(out);
    }
    std::string close(const std::vector<Choice>&) override { return {}; }

  private:
    static std::string event(const ordered_json& value) { return "data: " + dump(value) + "\n\n"; }

    static ordered_json part(int index, const std::string& content) {
        return {{"index", index},
                {"content", content},
                {"tokens", ordered_json::array()},
                {"stop", false},
                {"id_slot", -1}};
    }

    void finish(ordered_json& out, const Choice& c) const {
        const Outcome& o = c.outcome;
        out["stop"] = true;
        out["model"] = model_;
        out["tokens_predicted"] = o.answer_tokens;
        out["tokens_evaluated"] = o.prompt_tokens;
        out["tokens_cached"] = o.cached_tokens;
        out["has_new_line"] = c.content.find('\n') != std::string::npos;
        out["truncated"] = false;
        out["stop_type"] = o.stop_text ? "word" : o.end == Outcome::End::length ? "limit" : "eos";
        out["stopping_word"] = o.stop_text.value_or("");
        out["timings"] = timings_json(o);
    }

    std::string model_;
};

void add(std::vector<int32_t>& ids, const Tokenizer& tokenizer, const std::string& text) {
    const auto more = tokenizer.encode(text, Tokenizer::Markers::literal);
    ids.insert(ids.end(), more.begin(), more.end());
}

int32_t marker(const Tokenizer& tokenizer, const char* name) {
    const auto id = tokenizer.find_added(name);
    if (!id)
        throw ApiError(404, "not_supported",
                       std::string("the vocabulary of this model has no ") + name +
                           ", so it cannot fill in between two texts");
    return *id;
}

}  // namespace

std::vector<int32_t> infill_prompt(const Tokenizer& tokenizer, Fields& f) {
    std::vector<int32_t> ids;
    const auto mark = [&](const char* name) { ids.push_back(marker(tokenizer, name)); };
    const ordered_json* extra = f.list("input_extra");
    if (extra != nullptr && !extra->empty()) {
        mark("<|repo_name|>");
        add(ids, tokenizer, "repository\n");
        for (size_t i = 0; i < extra->size(); ++i) {
            Fields file((*extra)[i], "input_extra[" + std::to_string(i) + "]");
            mark("<|file_sep|>");
            add(ids, tokenizer,
                file.string("filename").value_or("file") + "\n" + file.string("text").value_or("") + "\n");
        }
        mark("<|file_sep|>");
        add(ids, tokenizer, f.string("filename").value_or("file") + "\n");
    }
    mark("<|fim_prefix|>");
    add(ids, tokenizer, f.string("input_prefix").value_or("") + f.string("prompt").value_or(""));
    mark("<|fim_suffix|>");
    add(ids, tokenizer, f.string("input_suffix").value_or(""));
    mark("<|fim_middle|>");
    return ids;
}

std::unique_ptr<AnswerFormat> llama_format(const GenerationRequest& request) {
    return std::make_unique<LlamaFormat>(request);
}

}  // namespace quern
