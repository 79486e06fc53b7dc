#include "tools/engine/answer_reader.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <thread>

#include "ggml-like/parallel.h"
#include "models/model.h"

namespace quern {
namespace {

constexpr size_t kLongestName = 512;  // bytes; what goes on without an end is no name

/// `allowed`: those that may be called; empty: all.
std::vector<std::string> tool_names(const nlohmann::ordered_json& tools,
                                    const std::vector<std::string>& allowed) {
    std::vector<std::string> names;
    if (!tools.is_array()) return names;
    if (!allowed.empty()) return allowed;
    for (const auto& tool : tools) {
        const auto& f = tool.contains("function") ? tool["function"] : tool;
        if (f.contains("name") && f["name"].is_string()) names.push_back(f["name"].get<std::string>());
    }
    return names;
}

/// How much of the end of `text` may be the beginning of `stop`.
size_t overlap(std::string_view text, std::string_view stop) {
    for (size_t n = std::min(text.size(), stop.size()); n > 0; --n)
        if (text.substr(text.size() - n) == stop.substr(0, n)) return n;
    return 0;
}

/// Ids of the `count` highest values, the highest first; of equal ones the lower id first.
std::vector<int32_t> highest_ids(std::span<const float> row, size_t count) {
    std::vector<int32_t> ids;
    const auto before = [&](float value, int32_t id) { return value > row[static_cast<size_t>(id)]; };
    for (size_t i = 0; i < row.size() && count > 0; ++i) {
        if (ids.size() == count) {
            if (!before(row[i], ids.back())) continue;
            ids.pop_back();
        }
        ids.insert(std::upper_bound(ids.begin(), ids.end(), row[i], before), static_cast<int32_t>(i));
    }
    return ids;
}

}  // namespace

std::string StopFinder::push(std::string_view text) {
    if (found_) return {};
    held_ += text;
    size_t first = std::string::npos, held = 0;
    for (const std::string& stop : stops_) {
        const size_t at = held_.find(stop);
        if (at < first) {
            first = at;
            found_ = stop;
        }
        held = std::max(held, overlap(held_, stop));
    }
    const size_t sure = found_ ? first : held_.size() - held;
    std::string out = held_.substr(0, sure);
    held_.erase(0, sure);
    return out;
}

std::string StopFinder::flush() { return found_ ? std::string() : std::move(held_); }

AnswerReader::AnswerReader(const Model& model, AnswerRules rules)
    : tokenizer_(*model.tokenizer()),
      format_(model.chat()),
      rules_(std::move(rules)),
      stop_ids_(model.generation().eos_ids),
      call_id_(tokenizer_.find_added(format_.call_marker)),
      parser_(format_.parser(
          rules_.chat && rules_.thinking_open,
          rules_.calls == AnswerRules::Calls::none ? nlohmann::ordered_json() : rules_.tools, 0)),
      decoder_(tokenizer_, true),
      stop_(rules_.stops),
      matcher_(rules_.grammar),
      names_(tool_names(rules_.tools, rules_.call_names)) {
    if (names_.empty()) rules_.calls = AnswerRules::Calls::none;
    if (rules_.calls != AnswerRules::Calls::none && rules_.call_grammar == nullptr)
        rules_.call_grammar = Grammar::calls(rules_.tools, rules_.call_names, rules_.parallel_calls);
    if (rules_.call_grammar == nullptr) rules_.calls = AnswerRules::Calls::none;
    matching_ = rules_.grammar != nullptr && !parser_->in_reasoning();
}

/// How a demanded call begins; where there is a choice, the model writes the name.
std::string AnswerReader::call_prefix() {
    call_begun_ = true;
    call_in_thinking_ = false;
    std::string text = format_.call_begin;
    if (names_.size() == 1) text += names_.front() + format_.call_arguments;
    call_.emplace(rules_.call_grammar);
    call_->push(std::string_view(text).substr(std::string_view(format_.call_marker).size()));
    return text;
}

std::vector<int32_t> AnswerReader::opening() {
    if (rules_.calls != AnswerRules::Calls::required || parser_->in_reasoning()) return {};
    const std::string text = call_prefix();
    parse(text);  // no call is complete yet: nothing to deliver
    return tokenizer_.encode(text, Tokenizer::Markers::control);
}

void AnswerReader::attach(Request& request, std::function<bool(const AnswerDelta&)> deliver) {
    request.on_token = [this, deliver = std::move(deliver)](int32_t id) { return push(id, deliver); };
    const bool required = rules_.calls == AnswerRules::Calls::required;
    if (required || parser_->in_reasoning()) request.force = [this] { return forced(); };
    const bool no_calls = rules_.calls == AnswerRules::Calls::none && !names_.empty();
    if (required || no_calls || rules_.grammar || rules_.call_grammar)
        request.allow = [this](int32_t id) { return allows(id); };
    if (rules_.grammar || rules_.call_grammar)
        request.narrow = [this](std::span<float> logits) { narrow(logits); };
    if (!names_.empty() && call_id_)
        request.copies = [this](std::span<const int32_t> tokens) { return copies(tokens); };
    if (rules_.top_logprobs >= 0)
        request.on_logits = [this](int32_t id, std::span<const float> row) {
            logprobs_.push_back(report(id, row));
        };
    if (rules_.prompt_logprobs) note_prompt(request);
}

void AnswerReader::note_prompt(Request& request) {
    logprobs_.push_back({request.prompt.front(), {}, {}});
    request.on_prompt_logits = [this, prompt = request.prompt](const PromptLogits& logits) {
        const auto next = static_cast<size_t>(logits.first) + 1;
        std::vector<TokenLogprob> reports(std::min(logits.count(), prompt.size() - next));
        const auto threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
        for_each_parallel(threads, reports.size(),
                          [&](size_t i) { reports[i] = report(prompt[next + i], logits.row(i)); });
        std::move(reports.begin(), reports.end(), std::back_inserter(logprobs_));
    };
}

ChatDelta AnswerReader::parse(std::string_view text) {
    if (rules_.chat) return parser_->push(text);
    ChatDelta plain;
    plain.content = text;
    return plain;
}

bool AnswerReader::push(int32_t id, const std::function<bool(const AnswerDelta&)>& deliver) {
    ++tokens_;
    follow_name(id);
    const bool reasoning = parser_->in_reasoning();
    if (reasoning) {
        // Text that closes the thinking in the model's place does not count as thinking.
        if (rules_.thinking_budget < 0 || reasoning_tokens_ < rules_.thinking_budget) ++reasoning_tokens_;
        logprobs_.clear();  // reports are about the content
    }
    if (forced_left_ == 0) follow_call(id);
    if (reasoning || forced_left_ > 0) {
        // Forced text is right by construction.
    } else if (rules_.grammar && call_id_ == id) {
        matching_ = false;  // a call in place of the document
    } else if (matching_) {
        matcher_.push(tokenizer_.piece(id));
    }
    const AnswerDelta delta = read(parse(decoder_.push(id)));
    forced_left_ -= forced_left_ > 0;
    just_closed_ = reasoning && !parser_->in_reasoning();
    if (just_closed_ && rules_.grammar && calls_ == 0) matching_ = true;
    if (matching_ && matcher_.finished()) ended_ = true;
    const bool go_on = delta.empty() || deliver(delta);
    return go_on && !ended_;
}

AnswerDelta AnswerReader::read(const ChatDelta& parsed) {
    AnswerDelta out;
    out.reasoning = parsed.reasoning;
    out.content = stop_.push(parsed.content);
    for (const ToolCallPiece& piece : parsed.call_pieces)
        if (rules_.parallel_calls || calls_ == 0) out.call_pieces.push_back(piece);
    for (const ToolCallDelta& call : parsed.tool_calls) {
        if (!rules_.parallel_calls && calls_ > 0) break;
        out.tool_calls.push_back(call);
        ++calls_;
    }
    if (stop_.found() || (!rules_.parallel_calls && calls_ > 0)) ended_ = true;
    content_ += out.content;
    if (!rules_.chat && !out.content.empty()) out.logprobs = std::move(logprobs_), logprobs_.clear();
    if (rules_.chat) take_reports(out);
    return out;
}

/// The reports of the tokens that make up the new content. Tokens whose text is no content, such as space around the
/// thinking, a stop text or a call, are not reported.
void AnswerReader::take_reports(AnswerDelta& out) {
    if (rules_.top_logprobs < 0) return;
    std::string_view rest = out.content;
    size_t used = 0;
    const size_t ahead = std::min(reported_ahead_.size(), rest.size());
    if (rest.substr(0, ahead) == std::string_view(reported_ahead_).substr(0, ahead))
        rest.remove_prefix(ahead);
    reported_ahead_.erase(0, ahead);
    for (; used < logprobs_.size() && !rest.empty(); ++used) {
        const std::string_view piece = tokenizer_.piece(logprobs_[used].id);
        const size_t space = std::min(piece.find_first_not_of(" \n\t\r"), piece.size());
        const std::string_view bare = piece.substr(space);
        const bool begins = content_.size() == out.content.size() && rest.data() == out.content.data();
        const std::string_view text = begins && !rest.starts_with(piece) ? bare : piece;
        if (text.empty()) continue;
        if (rest.starts_with(text)) {
            rest.remove_prefix(text.size());
        } else if (text.starts_with(rest)) {
            reported_ahead_ = text.substr(rest.size());
            rest = {};
        } else {
            continue;
        }
        out.logprobs.push_back(std::move(logprobs_[used]));
    }
    logprobs_.erase(logprobs_.begin(), logprobs_.begin() + static_cast<ptrdiff_t>(used));
    if (!out.tool_calls.empty()) logprobs_.clear();
}

AnswerDelta AnswerReader::finish(FinishReason reason) {
    ChatDelta rest = parse(decoder_.flush());
    if (rules_.chat) {
        const ChatDelta last = parser_->finish(reason != FinishReason::stop && !ended_);
        rest.reasoning += last.reasoning;
        rest.content += last.content;
        rest.call_pieces.insert(rest.call_pieces.end(), last.call_pieces.begin(), last.call_pieces.end());
        rest.tool_calls.insert(rest.tool_calls.end(), last.tool_calls.begin(), last.tool_calls.end());
    }
    AnswerDelta out = read(rest);
    const std::string held = stop_.flush();
    if (!held.empty()) {
        AnswerDelta last;
        last.content = held;
        content_ += held;
        if (rules_.chat) take_reports(last);
        out.content += held;
        std::move(last.logprobs.begin(), last.logprobs.end(), std::back_inserter(out.logprobs));
    }
    if (!rules_.chat) std::move(logprobs_.begin(), logprobs_.end(), std::back_inserter(out.logprobs));
    return out;
}

std::vector<int32_t> AnswerReader::forced() {
    const bool demanded = rules_.calls == AnswerRules::Calls::required && !call_begun_ && calls_ == 0;
    std::string text;
    if (parser_->in_reasoning()) {
        const bool spent = rules_.thinking_budget >= 0 && reasoning_tokens_ >= rules_.thinking_budget;
        if (!spent && !end_thinking_) return {};
        text = format_.close_thinking;
    } else if (!demanded) {
        return {};
    } else if (just_closed_) {
        text = format_.before_call;
    }
    call_.reset();  // one that was begun while thinking
    if (demanded) text += call_prefix();
    auto ids = tokenizer_.encode(text, Tokenizer::Markers::control);
    forced_left_ = ids.size();
    return ids;
}

/// From marker to marker the grammar of calls rules. While thinking, a marker alone may only be mentioned.
void AnswerReader::follow_call(int32_t id) {
    const std::string_view piece = tokenizer_.piece(id);
    if (!call_ && call_id_ == id && rules_.call_grammar) {
        call_.emplace(rules_.call_grammar);
        call_in_thinking_ = parser_->in_reasoning();
    } else if (call_) {
        call_->push(piece);
        feed_after_call_ = false;
        if (call_->finished() || call_->dead()) call_.reset();
    } else {
        feed_after_call_ = piece == "\n";
    }
}

/// Where the name of a call is written.
void AnswerReader::follow_name(int32_t id) {
    if (call_id_ == id) {
        naming_ = "";
    } else if (naming_) {
        *naming_ += tokenizer_.piece(id);
        if (naming_->find(format_.call_name_end) != std::string::npos || naming_->size() > kLongestName)
            naming_.reset();
    }
}

/// Which tool is called is the choice that a copy would get wrong most often: no draft from a call's marker to the end of
/// the name.
size_t AnswerReader::copies(std::span<const int32_t> tokens) const {
    if (naming_) return 0;
    return static_cast<size_t>(std::find(tokens.begin(), tokens.end(), *call_id_) - tokens.begin());
}

bool AnswerReader::allows_in_call(int32_t id) const {
    if (call_in_thinking_) {
        if (naming_ && naming_->find('=') == std::string::npos) return true;
        if (tokenizer_.piece(id) == format_.thinking_end) return true;  // it was only thought about
    }
    return !tokenizer_.is_special(id) && call_->accepts(tokenizer_.piece(id));
}

/// After calls that were demanded nothing comes but more of them.
bool AnswerReader::allows_after_call(int32_t id) const {
    return rules_.parallel_calls && (call_id_ == id || (!feed_after_call_ && tokenizer_.piece(id) == "\n"));
}

bool AnswerReader::allows(int32_t id) const {
    const bool stop = std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
    const bool required = rules_.calls == AnswerRules::Calls::required;
    if (rules_.calls == AnswerRules::Calls::none && !names_.empty() && call_id_ == id) return false;
    if (call_) return !stop && allows_in_call(id);
    if (parser_->in_reasoning()) return !stop || !(required || rules_.grammar);  // it is to say something yet
    if (required) return calls_ == 0 ? !stop : stop || allows_after_call(id);
    if (!matching_) return true;
    if (stop) return matcher_.complete();
    if (call_id_ == id) return rules_.calls == AnswerRules::Calls::free && content_.empty();
    return !tokenizer_.is_added(id) && matcher_.accepts(tokenizer_.piece(id));
}

/// The grammar that all tokens must follow now, but those that end the answer or begin a call; null: none.
const GrammarMatcher* AnswerReader::ruling() const {
    if (call_) return call_in_thinking_ ? nullptr : &*call_;
    const bool free = rules_.calls != AnswerRules::Calls::required && !parser_->in_reasoning();
    return free && matching_ ? &matcher_ : nullptr;
}

/// By first bytes: inside a character, or between the tokens of JSON, few of them may follow.
void AnswerReader::narrow(std::span<float> logits) const {
    const GrammarMatcher* grammar = ruling();
    if (grammar == nullptr) return;
    std::vector<std::pair<size_t, float>> others;  // that the grammar says nothing of
    const auto keep = [&](int32_t id) {
        const auto at = static_cast<size_t>(id);
        if (at < logits.size()) others.emplace_back(at, logits[at]);
    };
    for (const int32_t id : stop_ids_) keep(id);
    if (call_id_) keep(*call_id_);
    const std::bitset<256>& first = grammar->first_bytes();
    for (size_t i = 0; i < logits.size(); ++i) {
        const std::string_view piece = tokenizer_.piece(static_cast<int32_t>(i));
        if (piece.empty() || !first[static_cast<unsigned char>(piece.front())]) logits[i] = -INFINITY;
    }
    for (const auto& [at, logit] : others) logits[at] = logit;
}

TokenLogprob AnswerReader::report(int32_t id, std::span<const float> logits) const {
    const size_t vocab = std::min(logits.size(), static_cast<size_t>(tokenizer_.size()));
    const auto row = logits.first(vocab);
    const double highest = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const float x : row) sum += std::exp(x - highest);
    const double norm = highest + std::log(sum);
    TokenLogprob out{id, row[static_cast<size_t>(id)] - norm, {}};
    for (const int32_t other : highest_ids(row, static_cast<size_t>(rules_.top_logprobs)))
        out.top.emplace_back(other, row[static_cast<size_t>(other)] - norm);
    return out;
}

}  // namespace quern
