// The chat on a terminal: lines in, answers out, and commands that begin with a slash.
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "ggml-like/check.h"
#include "models/model.h"
#include "models/python_text.h"
#include "tools/common/cli_values.h"
#include "tools/common/images/read_images.h"
#include "tools/engine/memory_plan.h"
#include "tools/run/answer.h"
#include "tools/run/attachments.h"
#include "tools/run/input.h"
#include "tools/run/line_editor.h"
#include "tools/run/text_width.h"
#include "tools/run/transcript.h"

namespace quern {
namespace {

constexpr int kWideHelp = 70;  // columns from which names and explanations stand side by side

class Repl {
  public:
    explicit Repl(RunContext& context)
        : c_(context),
          session_(context.engine),
          attached_(context.engine, context.options.fps),
          stats_(context.options.stats.value_or(isatty(STDERR_FILENO) == 1)),
          editor_(context.signals, history_file(context.options)),
          tools_(tool_command(context, [this](const std::string& what, const std::string& question) {
              return ask_person(what, question);
          })) {
        editor_.on_tab([](std::string_view line) { return complete_line(line, command_names()); });
        if (!c_.options.system.empty()) system_ = c_.options.system;
        for (const std::string& file : c_.options.images) attached_.add_image(file);
        for (const std::string& files : c_.options.videos) attached_.add_frames(files);
    }

    int run() {
        banner();
        if (c_.options.prompt) ask(*c_.options.prompt);
        std::string line;
        for (bool interrupted = false; !leaving_;) {
            if (c_.options.single_turn && answered_) break;
            const auto end = read_message(line);
            if (end == LineEditor::End::eof) break;
            if (end == LineEditor::End::terminated) return c_.signals.terminated();
            if (end == LineEditor::End::interrupt) {  // clears the line; twice at an empty one leaves
                if (interrupted && line.empty()) return kExitInterrupted;
                interrupted = line.empty();
                if (interrupted) remark("Ctrl-C again or Ctrl-D leaves.");
                continue;
            }
            interrupted = false;
            if (python_strip(line).empty()) continue;
            editor_.remember(line);
            handle(line);
            if (c_.signals.terminated() != 0) return c_.signals.terminated();
        }
        return 0;
    }

  private:
    struct Command {
        std::vector<const char*> names;
        const char* arguments;
        const char* help;
        std::function<void(Repl&, const std::string&)> run;
    };
    static const std::vector<Command>& commands();

    static std::string history_file(const RunOptions& o) {
        const std::string state = o.history ? state_directory() : "";
        return state.empty() ? "" : state + "/history";
    }

    void remark(const std::string& text, int indent = 0) const {
        Printer(When::never, c_.options.color).remark(text, indent);
    }

    /// Without colours, for lists.
    static void print(const std::string& text, int indent) {
        note(wrap_text(text, terminal_columns(STDERR_FILENO), indent));
    }

    /// With their slash.
    static std::vector<std::string> command_names() {
        std::vector<std::string> names;
        for (const Command& command : commands())
            for (const char* name : command.names) names.push_back(std::string("/") + name);
        return names;
    }

    std::string ask_person(const std::string& what, const std::string& question) {
        std::string line;
        remark(what);
        const bool answered = editor_.interactive() && editor_.read(question, line) == LineEditor::End::line;
        return answered ? line : "";
    }

    void banner() const {
        const ModelInfo& i = c_.engine.model().info();
        remark(
            fmt::format("{}: {:.1f} M parameters, {}, context {}. /help lists the commands, Ctrl-D leaves.",
                        i.name, static_cast<double>(i.parameters) / 1e6, i.formats, c_.engine.context()));
    }

    /// One message: a line, lines joined by a trailing backslash, or a block between """ and """. After
    /// Ctrl-C, what there was of it.
    LineEditor::End read_message(std::string& message) {
        std::string line;
        auto end = editor_.read("> ", line);
        message = end == LineEditor::End::interrupt ? line : "";
        if (end != LineEditor::End::line) return end;
        const std::string_view bare = python_strip(line);
        if (bare.starts_with("\"\"\"")) {
            message = std::string(bare.substr(3));
            while (!message.ends_with("\"\"\"")) {
                if ((end = editor_.read("... ", line)) != LineEditor::End::line) return end;
                message += (message.empty() ? "" : "\n") + line;
            }
            message.resize(message.size() - 3);
            return end;
        }
        while (line.ends_with('\\')) {
            message += line.substr(0, line.size() - 1) + "\n";
            if ((end = editor_.read("... ", line)) != LineEditor::End::line) return end;
        }
        message += line;
        return end;
    }

    void handle(const std::string& line) {
        if (const DroppedImages dropped = dropped_images(line); !dropped.paths.empty())
            return take_dropped(dropped);
        if (!line.starts_with('/')) return ask(line);
        if (line.starts_with("//")) return ask(line.substr(1));
        const size_t space = line.find_first_of(" \n");
        const std::string name = line.substr(1, space == std::string::npos ? space : space - 1);
        const std::string argument =
            space == std::string::npos ? "" : std::string(python_strip(std::string_view(line).substr(space)));
        try {
            for (const Command& command : commands())
                for (const char* own : command.names)
                    if (name == own) return command.run(*this, argument);
            std::vector<std::string> known;
            for (const Command& command : commands())
                known.insert(known.end(), command.names.begin(), command.names.end());
            FAIL(usage,
                 "there is no command /{}{} (/help lists them; // sends a message that begins with a slash)",
                 printable(name), did_you_mean(name, known));
        } catch (const Error& error) {
            remark(printable(error.what(), 2000));
        }
    }

    std::vector<Message> conversation() const {
        std::vector<Message> all;
        if (!system_.empty()) all.push_back({.role = "system", .content = system_});
        all.insert(all.end(), messages_.begin(), messages_.end());
        return all;
    }

    void ask(const std::string& text) {
        messages_.push_back(attached_.message(text));
        answer();
    }

    void answer() {
        while (respond() && run_tools(tools_, last_, messages_)) {
        }
        if (!messages_.empty() && messages_.back().role == "tool")
            remark("(not run; the next message goes on from there)");
    }

    /// One answer of the model. False: there is none.
    bool respond() {
        Printer printer(c_.options.show_thinking, c_.options.color);
        const ChatCallbacks callbacks{.reasoning = [&](const std::string& t) { printer.reasoning(t); },
                                      .content = [&](const std::string& t) { printer.content(t); },
                                      .tool_call = [&](const ToolCall& t) { printer.tool_call(t); },
                                      .keep_going =
                                          [&] {
                                              return !printer.closed() && !c_.signals.interrupted() &&
                                                     c_.signals.terminated() == 0;
                                          }};
        c_.signals.polite(true);
        try {
            const QuietTerminal quiet(c_.signals);
            last_ = session_.respond(conversation(), chat_settings(c_), callbacks);
        } catch (const Error& error) {
            printer.finish();
            drop_last_question();
            remark(printable(error.what(), 2000));
            return false;
        }
        printer.finish();
        c_.signals.take_interrupt();
        answered_ = true;
        if (printer.closed()) leaving_ = true;
        if (!last_.error.empty()) remark("error: " + last_.error);
        if (last_.reason == FinishReason::cancelled) remark("(stopped)");
        if (last_.reason == FinishReason::length)
            remark("(cut off: the limit of the answer or the context is reached)");
        messages_.push_back(last_.message);
        if (stats_) remark(stats_line(last_, c_));
        return true;
    }

    /// Removes the last question and all after it; returns it, or nothing.
    std::optional<Message> drop_last_question() {
        while (!messages_.empty()) {
            const Message m = messages_.back();
            messages_.pop_back();
            if (m.role == "user") return m;
        }
        return {};
    }

    void regenerate() {
        const auto question = drop_last_question();
        if (!question) return remark("there is no answer to make again");
        messages_.push_back(*question);
        answer();
    }

    void undo() {
        remark(drop_last_question() ? "the last question and its answer are forgotten" : "nothing to undo");
    }

    void clear() {
        messages_.clear();
        attached_.clear();
        file_.clear();
        remark("a new conversation");
    }

    void set_system(const std::string& text) {
        system_ = text;
        remark(text.empty() ? "no system prompt" : "system prompt set; it holds from the next answer on");
    }

    void set_thinking(bool on, const std::string& budget) {
        set_value(c_.settings, "think", on ? "on" : "off", "/think", on ? "/think" : "/nothink");
        if (!budget.empty()) set_value(c_.settings, "reasoning_budget", budget, "/think", "/think");
        const int64_t most = c_.settings.reasoning_budget;
        if (!on) return remark("answering without thinking");
        if (most == 0) return remark("answering without thinking: 0 tokens of it are allowed (/think -1)");
        remark(most < 0 ? "thinking before answering"
                        : fmt::format("thinking before answering, {} tokens at most", most));
    }

    void set_setting(std::string text) {
        if (text.starts_with("parameter ")) text.erase(0, 10);
        const size_t space = text.find_first_of(" =");
        if (space == std::string::npos) FAIL(usage, "/set NAME VALUE, for example /set temp 0.7");
        const std::string name = text.substr(0, space);
        set_value(c_.settings, name, python_strip(std::string_view(text).substr(space + 1)), name, "/set");
        remark(fmt::format("{} is set", name));
    }

    void show(const std::string& what) const {
        if (what.empty() || what == "params") print(describe(c_.settings), 4);
        if (what.empty() || what == "system")
            remark(system_.empty() ? "no system prompt" : "system: " + printable(system_, 2000));
        if (what.empty() || what == "model" || what == "mem") show_model();
    }

    void show_model() const {
        const ModelInfo& i = c_.engine.model().info();
        const MemoryPlan& plan = c_.engine.memory_plan();
        const std::string experts =
            i.experts > 0 ? fmt::format("{} experts ({} used)", i.experts, i.experts_used) : "dense";
        remark(
            fmt::format("{} ({}): {} layers, {} of attention, width {}, {}, {}\n"
                        "weights {:.1f} MB, {:.2f} MB read a token; state and scratch {:.1f} MB; {}",
                        i.name, i.architecture, i.layers, i.attention_layers, i.width, experts, i.formats,
                        static_cast<double>(i.weight_bytes) / 1e6, static_cast<double>(i.token_bytes) / 1e6,
                        static_cast<double>(plan.state_bytes() + plan.scratch_bytes()) / 1e6,
                        c_.engine.backend().description()));
        for (const std::string& text : c_.engine.model().notes()) remark(text);
    }

    /// Attaches files that were dropped at the beginning of a line, and asks what follows them.
    void take_dropped(const DroppedImages& dropped) {
        try {
            for (const std::string& path : dropped.paths) remark(attached_.add_image(path));
        } catch (const Error& error) {
            return remark(printable(error.what(), 2000));
        }
        if (!dropped.text.empty()) ask(dropped.text);
    }

    /// What this conversation was saved to or loaded from before is not asked about.
    void save(const std::string& name) {
        const std::string path = transcript_path(name.empty() ? "last" : name);
        if (path != file_ && std::filesystem::exists(path)) {
            if (!editor_.interactive()) FAIL(usage, "{} exists; give another name: /save NAME", path);
            if (!is_yes(ask_person(path + " exists.", "Replace it? [y, N] ")))
                return remark("nothing was saved; /save NAME takes another name");
        }
        save_transcript(path, conversation());
        file_ = path;
        remark("saved to " + path);
    }

    void load(const std::string& name) {
        const std::string path = transcript_path(name.empty() ? "last" : name);
        std::vector<Message> messages = load_transcript(path);
        file_ = path;
        system_.clear();
        if (!messages.empty() && messages[0].role == "system") {
            system_ = messages[0].content;
            messages.erase(messages.begin());
        }
        messages_ = std::move(messages);
        remark(fmt::format("{} messages", messages_.size()));
    }

    void list() const {
        const auto names = list_transcripts();
        if (names.empty()) return remark("no saved chats");
        for (const std::string& name : names) remark("  " + printable(name));
    }

    void set_stats(const std::string& text) {
        if (!text.empty()) stats_ = parse_switch(text, "/stats");
        remark(answered_ ? stats_line(last_, c_) : std::string("no answer yet"));
    }

    void context() const {
        remark(
            fmt::format("{} of {} tokens", last_.prompt_tokens + last_.answer_tokens, c_.engine.context()));
    }

    void help() const {
        const int columns = terminal_columns(STDERR_FILENO);
        const bool narrow = columns > 0 && columns < kWideHelp;
        std::string text;
        const auto row = [&](const std::string& what, const char* does) {
            text += narrow ? fmt::format("  {}\n      {}\n", what, does)
                           : fmt::format("  {:28} {}\n", what, does);
        };
        for (const Command& command : commands()) {
            std::string names;
            for (const char* name : command.names)
                names += fmt::format("{}/{}", names.empty() ? "" : " ", name);
            row(names + " " + command.arguments, command.help);
        }
        row("\"\"\" ... \"\"\"", "a message of several lines; a trailing \\ works too");
        row("Tab", "completes commands and names of files");
        row("Ctrl-C", "stops an answer and keeps what is there");
        row("Ctrl-Z", "to the shell; fg comes back");
        print(text, narrow ? 6 : 31);
    }

    RunContext& c_;
    ChatSession session_;
    std::vector<Message> messages_;
    std::string system_, file_;
    Attachments attached_;
    bool stats_, leaving_ = false, answered_ = false;
    ChatAnswer last_;
    LineEditor editor_;
    std::optional<ToolCommand> tools_;
};

const std::vector<Repl::Command>& Repl::commands() {
    using R = Repl&;
    using S = const std::string&;
    static const std::vector<Command> list = {
        {{"help", "?"}, "", "this list", [](R r, S) { r.help(); }},
        {{"exit", "quit", "bye"}, "", "leave", [](R r, S) { r.leaving_ = true; }},
        {{"clear", "new"}, "", "a new conversation", [](R r, S) { r.clear(); }},
        {{"regen"}, "", "answer the last question again", [](R r, S) { r.regenerate(); }},
        {{"undo"}, "", "forget the last question and its answer", [](R r, S) { r.undo(); }},
        {{"system"}, "TEXT", "set the system prompt; without TEXT: none", [](R r, S a) { r.set_system(a); }},
        {{"think"}, "[BUDGET]", "think before answering", [](R r, S a) { r.set_thinking(true, a); }},
        {{"nothink"}, "", "answer at once", [](R r, S a) { r.set_thinking(false, a); }},
        {{"set"},
         "NAME VALUE",
         "change a setting: temp, top_k, top_p, seed, n ...",
         [](R r, S a) { r.set_setting(a); }},
        {{"show"}, "[WHAT]", "settings and their origin; params, system, model", [](R r, S a) { r.show(a); }},
        {{"stats"}, "[on|off]", "numbers of the last answer", [](R r, S a) { r.set_stats(a); }},
        {{"ctx"}, "", "how much of the context is used", [](R r, S) { r.context(); }},
        {{"read"},
         "FILE",
         "attach a text file to the next message",
         [](R r, S a) { r.remark(r.attached_.add_text(a)); }},
        {{"image"},
         "FILE",
         "attach an image to the next message; a path that is dropped here does, too",
         [](R r, S a) { r.remark(r.attached_.add_image(a)); }},
        {{"frames"},
         "PATTERN",
         "attach a video, image files with such names, to the next message",
         [](R r, S a) { r.remark(r.attached_.add_frames(a)); }},
        {{"save"}, "[NAME]", "keep this conversation", [](R r, S a) { r.save(a); }},
        {{"load"}, "[NAME]", "go on with a kept one", [](R r, S a) { r.load(a); }},
        {{"list"}, "", "kept conversations", [](R r, S) { r.list(); }},
    };
    return list;
}

}  // namespace

int run_repl(RunContext& context) { return Repl(context).run(); }

}  // namespace quern
