// -p, -f, a pipe, or token ids: one prompt, one answer, exit.
#include <unistd.h>

#include <charconv>
#include <cstdio>

#include "ggml-like/check.h"
#include "models/model.h"
#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/common/images/read_images.h"
#include "tools/run/answer.h"
#include "tools/run/input.h"
#include "tools/run/line_editor.h"
#include "tools/run/npy_file.h"

namespace quern {
namespace {

/// The prompt of flags and standard input together.
std::string gather_prompt(const RunOptions& o) {
    std::string prompt = o.prompt_file.empty() ? o.prompt.value_or("") : read_input_file(o.prompt_file);
    if (o.prompt == "-") return read_standard_input();
    const bool piped = isatty(STDIN_FILENO) == 0;
    return piped ? join_prompt(prompt, read_standard_input()) : prompt;
}

std::vector<int32_t> parse_ids(const std::string& text, const std::string& file) {
    std::vector<int32_t> ids;
    for (size_t at = 0; (at = text.find_first_not_of(" \t\r\n,[]", at)) != std::string::npos;) {
        const size_t end = std::min(text.find_first_of(" \t\r\n,[]", at), text.size());
        ids.push_back(static_cast<int32_t>(parse_integer(text.substr(at, end - at), "token id in " + file, 0,
                                                         std::numeric_limits<int32_t>::max())));
        at = end;
    }
    return ids;
}

/// Lets a request write its logits; nothing happens without --dump-logits.
class LogitDump {
  public:
    LogitDump(const RunOptions& o, int64_t tokens, int64_t vocab) {
        if (!o.logits_file.empty()) file_.emplace(o.logits_file, tokens, vocab);
    }
    void attach(Request& request) {
        if (file_)
            request.on_prompt_logits = [this](const PromptLogits& logits) {
                for (size_t i = 0; i < logits.count(); ++i) file_->add_row(logits.row(i).data());
            };
    }
    void finish() {
        if (file_) file_->commit();
    }

  private:
    std::optional<NpyFile> file_;
};

/// Lets a request note its drafts; nothing happens without --dump-drafts.
class DraftDump {
  public:
    explicit DraftDump(const RunOptions& o) {
        if (!o.drafts_file.empty()) file_.emplace(o.drafts_file, 0644);
    }
    void attach(Request& request) {
        if (!file_) return;
        request.drafts.full = true;
        request.on_round = [this](int64_t position, std::span<const int32_t> drafted, int64_t accepted) {
            rounds_.push_back({{"position", position},
                               {"drafted", std::vector<int32_t>(drafted.begin(), drafted.end())},
                               {"accepted", accepted}});
        };
    }
    void finish() {
        if (!file_) return;
        file_->write(rounds_.dump() + "\n");
        file_->commit();
    }

  private:
    std::optional<AtomicFile> file_;
    nlohmann::ordered_json rounds_ = nlohmann::ordered_json::array();
};

/// Lets a request note what its first round is drafted from; nothing happens without --dump-draft-logits.
class DraftLogitDump {
  public:
    explicit DraftLogitDump(const RunOptions& o) : path_(o.draft_logits_file) {}
    /// After DraftDump: both see the rounds.
    void attach(Request& request) {
        if (path_.empty()) return;
        request.drafts.full = true;
        request.on_draft_logits = [this](std::span<const float> row) {
            if (!done_) rows_.emplace_back(row.begin(), row.end());
        };
        request.on_round = [this, next = request.on_round](int64_t position, std::span<const int32_t> drafted,
                                                           int64_t accepted) {
            done_ = true;
            if (next) next(position, drafted, accepted);
        };
    }
    void finish() const {
        if (path_.empty()) return;
        if (rows_.empty()) FAIL(runtime, "{}: no round was drafted; the answer has too few tokens", path_);
        NpyFile file(path_, static_cast<int64_t>(rows_.size()), static_cast<int64_t>(rows_.front().size()));
        for (const std::vector<float>& row : rows_) file.add_row(row.data());
        file.commit();
    }

  private:
    std::string path_;
    std::vector<std::vector<float>> rows_;
    bool done_ = false;
};

/// Logits of a text prompt: a run of its own, before the answer.
void dump_prompt_logits(RunContext& c, std::vector<int32_t> prompt, std::vector<ImagePtr> images) {
    LogitDump dump(c.options, static_cast<int64_t>(prompt.size()), c.engine.model().info().vocab_rows);
    Request request;
    request.prompt = std::move(prompt);
    request.images = std::move(images);
    request.max_tokens = 0;
    dump.attach(request);
    const Result result = c.engine.run(std::move(request));
    if (result.reason == FinishReason::error) FAIL(runtime, "{}", result.error);
    dump.finish();
}

std::vector<int32_t> prompt_ids(RunContext& c, const std::vector<Message>& messages, const std::string& raw) {
    const Tokenizer& tokenizer = *c.engine.model().tokenizer();
    if (c.options.raw) return tokenizer.encode(raw, Tokenizer::Markers::control);
    const ChatFormat& format = c.engine.model().chat();
    const ChatOptions options{.thinking = c.settings.thinking, .effort = c.options.effort};
    return encode_prompt(format.render(messages, c.tools, options), tokenizer);
}

std::vector<MessageImage> given_images(const RunContext& c) {
    std::vector<MessageImage> images;
    for (const std::string& file : c.options.images) images.push_back(image_of_file(file));
    for (const std::string& files : c.options.videos)
        images.push_back(
            {.where = files,
             .pairs = read_frame_files(files, c.options.fps, c.engine.model(), c.engine.image_sizes())});
    return images;
}

/// Each image token of the prompt becomes the tokens of the next image, and each video token those of the next pair of frames.
void put_images(Request& request, const std::vector<ImagePtr>& images, const std::vector<ImagePtr>& pairs,
                const VisionInfo& vision) {
    std::vector<int32_t> prompt;
    size_t used[2] = {};
    for (const int32_t id : request.prompt) {
        const bool of_video = id == vision.video_token;
        if (id != vision.token && !of_video) {
            prompt.push_back(id);
            continue;
        }
        const std::vector<ImagePtr>& list = of_video ? pairs : images;
        size_t& next = used[of_video];
        if (next == list.size())
            FAIL(usage, "--ids has more {} tokens ({}) than there are {}; give one for each with {}",
                 of_video ? "video" : "image", id, of_video ? "pairs of frames" : "images",
                 of_video ? "--frames" : "--image");
        prompt.insert(prompt.end(), list[next]->keys.begin(), list[next]->keys.end());
        request.images.push_back(list[next++]);
    }
    if (used[0] < images.size() || used[1] < pairs.size())
        FAIL(usage,
             "--ids has {} image tokens ({}) for {} images, and {} video tokens ({}) for {} pairs of frames",
             used[0], vision.token, images.size(), used[1], vision.video_token, pairs.size());
    request.prompt = std::move(prompt);
}

std::string ask_person(RunContext& c, const std::string& what, const std::string& question) {
    if (isatty(STDIN_FILENO) == 0) {
        note(what + ": not run, since nobody can be asked here (--tool-yes)\n");
        return "";
    }
    note(what + "\n");
    LineEditor editor(c.signals, "");
    std::string line;
    return editor.read(question, line) == LineEditor::End::line ? line : "";
}

void say_why_drafts(const RunContext& c) {
    if (const auto report = c.engine.speculation(); report && c.options.verbose)
        std::fputs(describe(*report).c_str(), stderr);
}

}  // namespace

int run_one_shot(RunContext& c) {
    const RunOptions& o = c.options;
    const std::string prompt = gather_prompt(o);
    if (prompt.empty()) FAIL(usage, "the prompt is empty: give one with -p, -f or through a pipe");
    std::vector<Message> messages;
    if (!o.system.empty()) messages.push_back({.role = "system", .content = o.system});
    messages.push_back({.role = "user", .content = prompt, .images = given_images(c)});
    read_images(messages, c.engine.model(), c.engine.image_sizes());
    if (!o.logits_file.empty()) {
        std::vector<ImagePtr> images;
        for (const MessageImage& image : messages.back().images) {
            if (image.image != nullptr) images.push_back(image.image);
            for (const FramePair& pair : image.pairs) images.push_back(pair.image);
        }
        dump_prompt_logits(c, prompt_ids(c, messages, prompt), std::move(images));
    }

    Printer printer(o.show_thinking, o.color);
    const Deadline deadline(o.timeout);
    c.signals.polite(true);
    ChatCallbacks callbacks;
    if (!o.json) {
        callbacks.reasoning = [&](const std::string& t) { printer.reasoning(t); };
        callbacks.content = [&](const std::string& t) { printer.content(t); };
        callbacks.tool_call = [&](const ToolCall& t) { printer.tool_call(t); };
    }
    callbacks.keep_going = [&] {
        return !printer.closed() && !c.signals.interrupted() && c.signals.terminated() == 0 &&
               !deadline.passed();
    };
    ChatSession session(c.engine);
    const ChatSettings settings = chat_settings(c);
    const auto tools = tool_command(c, [&](const std::string& what, const std::string& question) {
        return ask_person(c, what, question);
    });
    ChatAnswer answer;
    for (bool more = true; more;) {
        {
            const QuietTerminal quiet(c.signals);
            answer = o.raw ? session.complete(prompt, settings, callbacks)
                           : session.respond(messages, settings, callbacks);
        }
        messages.push_back(answer.message);
        more = run_tools(tools, answer, messages) && callbacks.keep_going();
    }
    if (o.json)
        printer.verbatim(
            answer_json(answer, c).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    printer.finish();
    if (!answer.error.empty()) printer.remark("quern: error: " + answer.error);
    if (o.stats.value_or(isatty(STDERR_FILENO) == 1)) printer.remark(stats_line(answer, c));
    say_why_drafts(c);
    if (deadline.passed() && answer.reason == FinishReason::cancelled) return kExitTimeout;
    return exit_code(answer, c, printer);
}

int run_ids(RunContext& c) {
    const RunOptions& o = c.options;
    const bool piped = o.ids_file == "-";
    Request request;
    request.prompt = parse_ids(piped ? read_standard_input() : read_input_file(o.ids_file),
                               piped ? "standard input" : o.ids_file);
    std::vector<ImagePtr> images, pairs;
    for (const std::string& file : o.images)
        images.push_back(read_image_file(file, c.engine.model(), c.engine.image_sizes()));
    for (const std::string& files : o.videos)
        for (FramePair& pair : read_frame_files(files, o.fps, c.engine.model(), c.engine.image_sizes()))
            pairs.push_back(std::move(pair.image));
    if (!images.empty() || !pairs.empty())
        put_images(request, images, pairs, *c.engine.model().info().vision);
    const ChatSettings settings = chat_settings(c);
    request.sampling = settings.sampling;
    request.max_tokens = settings.max_tokens;
    if (!settings.ignore_eos) request.stop_ids = c.engine.model().generation().eos_ids;
    const Deadline deadline(o.timeout);
    c.signals.polite(true);
    request.on_token = [&](int32_t) {
        return !c.signals.interrupted() && c.signals.terminated() == 0 && !deadline.passed();
    };
    LogitDump dump(o, static_cast<int64_t>(request.prompt.size()), c.engine.model().info().vocab_rows);
    dump.attach(request);
    DraftDump drafts(o);
    drafts.attach(request);
    DraftLogitDump draft_logits(o);
    draft_logits.attach(request);
    const Result result = c.engine.run(std::move(request));
    if (result.reason == FinishReason::error) FAIL(runtime, "{}", result.error);
    dump.finish();
    drafts.finish();
    draft_logits.finish();
    std::string line;
    for (int32_t id : result.tokens) line += fmt::format("{}{}", line.empty() ? "" : " ", id);
    Printer printer(o.show_thinking, o.color);
    printer.verbatim(line);
    printer.finish();
    const ChatAnswer summary{.reason = result.reason,
                             .prompt_tokens = result.prompt_tokens,
                             .answer_tokens = static_cast<int64_t>(result.tokens.size()),
                             .drafted = result.drafted,
                             .accepted = result.accepted,
                             .timing = result.timing};
    if (o.stats.value_or(isatty(STDERR_FILENO) == 1)) printer.remark(stats_line(summary, c));
    say_why_drafts(c);
    if (deadline.passed()) return kExitTimeout;
    return exit_code(summary, c, printer);
}

}  // namespace quern
