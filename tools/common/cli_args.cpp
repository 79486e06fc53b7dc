#include "tools/common/cli_args.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"
#include "tools/common/output.h"

namespace quern {
namespace {

constexpr std::string_view kEnvironmentPrefix = "QUERN_ARG_";
constexpr size_t kHelpColumn = 34;
constexpr size_t kHelpWidth = 100;

// Flags of other subcommands: setting them in the environment is no mistake.
const std::vector<std::string>& names_elsewhere() {
    static const std::vector<std::string> names = {
        "host",    "port",        "alias",      "api-key",   "api-key-file",  "cors-origins", "timeout",
        "metrics", "props",       "slots",      "cache-ram", "parallel",      "ctx-size",     "model",
        "threads", "ubatch-size", "gpu-layers", "queue",     "drain-timeout", "allowed-hosts"};
    return names;
}

std::vector<std::string> split_names(const std::string& names) {
    std::vector<std::string> out;
    size_t start = 0;
    while (start <= names.size()) {
        const size_t comma = std::min(names.find(',', start), names.size());
        out.push_back(names.substr(start, comma - start));
        start = comma + 1;
    }
    return out;
}

std::string environment_name(std::string_view flag) {
    std::string out;
    for (char c : flag.substr(flag.find_first_not_of('-'))) {
        out += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    return out;
}

// "-5" and "-.5" are values; "-n128" is a short flag with its value attached.
bool starts_number(std::string_view text) {
    const size_t sign = !text.empty() && text[0] == '-' ? 1 : 0;
    return text.size() > sign && (std::isdigit(static_cast<unsigned char>(text[sign])) || text[sign] == '.');
}

/// Names of flags that were given by another one of their names, with that one.
std::map<std::string, std::string, std::less<>>& typed_names() {
    static std::map<std::string, std::string, std::less<>> names;
    return names;
}

bool is_name_part(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_'; }

/// The length of the text in quotes that begins a message after `before`; 0: there is none. An apostrophe in a word opens
/// and closes nothing.
size_t quoted_length(char before, std::string_view message) {
    if (message.front() != '\'' || std::string_view(" \n(").find(before) == std::string_view::npos) return 0;
    for (size_t end = message.find('\'', 1); end != std::string_view::npos; end = message.find('\'', end + 1))
        if (end + 1 == message.size() || !is_name_part(message[end + 1])) return end + 1;
    return 0;
}

void append_wrapped(const std::string& text, std::string& out) {
    size_t column = kHelpColumn, start = 0;
    while (start < text.size()) {
        const size_t end = std::min(text.find_first_of(" \n", start), text.size());
        if (column + (end - start) > kHelpWidth && column > kHelpColumn) {
            if (out.back() == ' ') out.pop_back();
            out += "\n" + std::string(kHelpColumn, ' ');
            column = kHelpColumn;
        }
        out += text.substr(start, end - start);
        column += end - start;
        if (end < text.size() && text[end] == '\n') {
            out += "\n" + std::string(kHelpColumn, ' ');
            column = kHelpColumn;
        } else if (end < text.size()) {
            out += ' ';
            ++column;
        }
        start = end + 1;
    }
    out += '\n';
}

}  // namespace

ArgParser::ArgParser(std::string command, std::string summary, std::string usage)
    : command_(std::move(command)), summary_(std::move(summary)), usage_(std::move(usage)) {
    sections_.push_back("Options");
}

void ArgParser::section(std::string title) { sections_.push_back(std::move(title)); }
void ArgParser::footer(std::string text) { footer_ = std::move(text); }

void ArgParser::add(Flag flag, const std::string& names) {
    for (const std::string& name : split_names(names)) {
        if (name[0] == '!') {
            flag.negative.push_back(name.substr(1));
        } else {
            flag.names.push_back(name);
        }
    }
    const std::string& last = flag.names.back();
    flag.canonical = last.substr(last.find_first_not_of('-'));
    // CLI11 takes one letter for a short name.
    if (flag.canonical.size() == 1) flag.canonical = "short-" + flag.canonical;
    flag.section = sections_.size() - 1;
    flags_.push_back(std::move(flag));
}

void ArgParser::value(const std::string& names, std::string value_name, std::string help, Setter set) {
    add({Kind::value, {}, {}, "", std::move(value_name), std::move(help), {}, 0, std::move(set), {}}, names);
}

void ArgParser::values(const std::string& names, std::string value_name, std::string help, Setter set) {
    add({Kind::values, {}, {}, "", std::move(value_name), std::move(help), {}, 0, std::move(set), {}}, names);
}

void ArgParser::toggle(const std::string& names, std::string help, std::function<void(bool)> set) {
    add({Kind::toggle, {}, {}, "", "", std::move(help), {}, 0, {}, std::move(set)}, names);
}

void ArgParser::ignored(const std::string& names, std::string help, std::vector<std::string> choices) {
    add({Kind::ignored, {}, {}, "", "", std::move(help), std::move(choices), 0, {}, [](bool) {}}, names);
}

void ArgParser::positional(std::string name, std::string help, Setter set) {
    positional_name_ = std::move(name);
    positional_help_ = std::move(help);
    positional_set_ = std::move(set);
}

ArgParser::Flag* ArgParser::find(std::string_view name, bool* negative) {
    for (Flag& flag : flags_) {
        *negative = std::find(flag.negative.begin(), flag.negative.end(), name) != flag.negative.end();
        if (*negative) return &flag;
        if (std::find(flag.names.begin(), flag.names.end(), name) != flag.names.end()) return &flag;
    }
    return nullptr;
}

std::vector<std::string> ArgParser::all_names() const {
    std::vector<std::string> out = {"--help", "--version"};
    for (const Flag& flag : flags_) {
        out.insert(out.end(), flag.names.begin(), flag.names.end());
        out.insert(out.end(), flag.negative.begin(), flag.negative.end());
    }
    return out;
}

void ArgParser::append_flag(const Flag& flag, bool negative, std::vector<std::string>& out) const {
    out.push_back("--" + flag.canonical + (negative ? "=false" : ""));
}

void ArgParser::normalise_flag(const std::vector<std::string>& args, size_t& i,
                               std::vector<std::string>& out) {
    const std::string& arg = args[i];
    bool negative = false;
    Flag* flag = find(arg, &negative);
    const size_t equals = arg.find('=');
    if (flag == nullptr && equals != std::string::npos) {
        flag = find(std::string_view(arg).substr(0, equals), &negative);
        if (flag != nullptr && !flag->takes_value()) {
            if (flag->kind == Kind::ignored) return;
            const bool on = parse_switch(std::string_view(arg).substr(equals + 1), arg.substr(0, equals));
            return append_flag(*flag, on == negative, out);
        }
        if (flag != nullptr) {
            flag->typed = arg.substr(0, equals);
            append_flag(*flag, false, out);
            out.push_back(arg.substr(equals + 1));
            return;
        }
    }
    if (flag == nullptr && arg.size() > 2 && arg[1] != '-' &&
        starts_number(std::string_view(arg).substr(2))) {
        flag = find(std::string_view(arg).substr(0, 2), &negative);
        if (flag != nullptr && flag->takes_value()) {
            flag->typed = arg.substr(0, 2);
            append_flag(*flag, false, out);
            out.push_back(arg.substr(2));
            return;
        }
        flag = nullptr;
    }
    if (flag == nullptr) {
        const std::string name = arg.substr(0, equals);
        FAIL(usage, "unknown flag '{}'{} (quern {} --help lists them)", printable(name),
             did_you_mean(name, all_names()), command_);
    }
    if (flag->kind == Kind::ignored) {
        const auto& choices = flag->choices;
        if (i + 1 < args.size() && std::find(choices.begin(), choices.end(), args[i + 1]) != choices.end())
            ++i;
        return;
    }
    if (!negative) flag->typed = arg;
    append_flag(*flag, negative, out);
    if (!flag->takes_value()) return;
    if (i + 1 == args.size()) FAIL(usage, "{} needs a value: {} {}", arg, arg, flag->value_name);
    out.push_back(args[++i]);
}

std::vector<std::string> ArgParser::normalise(const std::vector<std::string>& args) {
    std::vector<std::string> out, rest;
    bool only_positional = false;
    for (size_t i = 0; i < args.size(); ++i) {
        const std::string& arg = args[i];
        if (only_positional || arg.size() < 2 || arg[0] != '-') {
            rest.push_back(arg);
        } else if (arg == "--") {
            only_positional = true;
        } else if (arg == "-h" || arg == "--help" || arg == "--version") {
            return {arg == "-h" ? "--help" : arg};
        } else {
            normalise_flag(args, i, out);
        }
    }
    if (rest.size() > (positional_set_ ? 1u : 0u)) {
        const std::string hint =
            positional_set_ ? fmt::format(" after {} '{}'", positional_name_, printable(rest[0])) : "";
        FAIL(usage, "unexpected argument '{}'{}; text with blanks needs quotes, and a prompt goes after -p",
             printable(rest.back()), hint);
    }
    if (!rest.empty()) {
        out.push_back("--");
        out.push_back(rest[0]);
    }
    return out;
}

std::vector<std::string> ArgParser::from_environment(const std::vector<std::string>& environment,
                                                     std::vector<std::string>* warnings) {
    std::vector<std::string> out, known;
    for (const std::string& entry : environment) {
        if (entry.rfind(kEnvironmentPrefix, 0) != 0) continue;
        const size_t equals = entry.find('=');
        if (equals == std::string::npos) continue;
        const std::string name = entry.substr(kEnvironmentPrefix.size(), equals - kEnvironmentPrefix.size());
        const std::string text = entry.substr(equals + 1);
        Flag* found = nullptr;
        known.clear();
        for (Flag& flag : flags_) {
            for (const std::string& candidate : flag.names) {
                if (candidate.rfind("--", 0) != 0) continue;
                known.push_back(std::string(kEnvironmentPrefix) + environment_name(candidate));
                if (environment_name(candidate) == name) found = &flag;
            }
        }
        const auto& elsewhere = names_elsewhere();
        const bool other = std::any_of(elsewhere.begin(), elsewhere.end(),
                                       [&](const std::string& n) { return environment_name(n) == name; });
        if (found == nullptr && !other && warnings != nullptr) {
            const std::string full = std::string(kEnvironmentPrefix) + name;
            warnings->push_back(fmt::format("environment variable {} is no flag of quern and has no effect{}",
                                            printable(full), did_you_mean(full, known)));
        }
        if (found == nullptr || found->kind == Kind::ignored) continue;
        if (found->typed.empty())
            found->typed = std::string(kEnvironmentPrefix) + name;  // else the line wins
        if (found->takes_value()) {
            append_flag(*found, false, out);
            out.push_back(text);
        } else {
            append_flag(*found, !parse_switch(text, std::string(kEnvironmentPrefix) + name), out);
        }
    }
    return out;
}

void ArgParser::apply(const std::vector<std::string>& normalised) {
    CLI::App app;
    app.set_help_flag();
    std::vector<std::vector<std::string>> collected(flags_.size());
    for (size_t f = 0; f < flags_.size(); ++f) {
        const Flag& flag = flags_[f];
        const std::string name = "--" + flag.canonical;
        if (flag.kind == Kind::ignored) continue;
        CLI::Option* option = nullptr;
        if (flag.takes_value()) {
            option = app.add_option(name, collected[f])->expected(1)->allow_extra_args(false);
        } else {
            option = app.add_flag(name, collected[f]);
        }
        const bool all = flag.kind == Kind::values;
        option->multi_option_policy(all ? CLI::MultiOptionPolicy::TakeAll : CLI::MultiOptionPolicy::TakeLast);
    }
    std::string place;
    CLI::Option* positional = nullptr;
    if (positional_set_) positional = app.add_option("positional", place);
    try {
        app.parse(std::vector<std::string>(normalised.rbegin(), normalised.rend()));
    } catch (const CLI::ParseError& error) {
        FAIL(usage, "{}", printable(error.what(), 300));
    }
    if (positional != nullptr && positional->count() > 0) positional_set_(place);
    for (size_t f = 0; f < flags_.size(); ++f) {
        for (const std::string& text : collected[f]) {
            if (flags_[f].takes_value()) {
                flags_[f].set(text);
            } else {
                flags_[f].set_bool(text == "true");
            }
        }
    }
}

bool ArgParser::parse(int argc, char** argv) {
    const std::vector<std::string> args(argv + std::min(argc, 1), argv + argc);
    const std::vector<std::string> given = normalise(args);
    if (!given.empty() && given[0] == "--help") {
        print(help());
        return false;
    }
    if (!given.empty() && given[0] == "--version") {
        print("quern " QUERN_VERSION "\n");
        return false;
    }
    std::vector<std::string> environment, warnings;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
        environment.push_back(*entry);
    std::vector<std::string> all = from_environment(environment, &warnings);
    for (const std::string& warning : warnings) std::fprintf(stderr, "quern: %s\n", warning.c_str());
    all.insert(all.end(), given.begin(), given.end());
    remember_names();
    apply(all);
    return true;
}

void ArgParser::remember_names() const {
    for (const Flag& flag : flags_)
        for (const std::string& name : flag.names)
            if (!flag.typed.empty() && name != flag.typed) typed_names()[name] = flag.typed;
}

void ArgParser::append_help(const Flag& flag, std::string& out) const {
    std::string left = "  ";
    for (const std::string& name : flag.names) left += (left.size() > 2 ? ", " : "") + name;
    for (const std::string& name : flag.negative) left += ", " + name;
    if (!flag.value_name.empty()) left += " " + flag.value_name;
    if (left.size() + 2 > kHelpColumn) {
        out += left + "\n" + std::string(kHelpColumn, ' ');
    } else {
        out += left + std::string(kHelpColumn - left.size(), ' ');
    }
    append_wrapped(flag.help, out);
}

std::string ArgParser::help() const {
    std::string out =
        fmt::format("quern {}: {}\n\nUsage: quern {} {}\n", command_, summary_, command_, usage_);
    if (positional_set_) {
        const std::string left = "  " + positional_name_;
        out += "\n" + left + std::string(kHelpColumn - std::min(kHelpColumn - 1, left.size()), ' ');
        append_wrapped(positional_help_, out);
    }
    for (size_t s = 0; s < sections_.size(); ++s) {
        const bool any =
            std::any_of(flags_.begin(), flags_.end(), [&](const Flag& f) { return f.section == s; });
        if (any) out += "\n" + sections_[s] + ":\n";
        for (const Flag& flag : flags_) {
            if (flag.section == s) append_help(flag, out);
        }
    }
    out += "\n  -h, --help" + std::string(kHelpColumn - 12, ' ') + "print this\n";
    out += "  --version" + std::string(kHelpColumn - 11, ' ') + "print the version\n";
    if (!footer_.empty()) out += "\n" + footer_ + (footer_.ends_with('\n') ? "" : "\n");
    return out;
}

std::string in_typed_names(std::string_view message) {
    std::string out;
    while (!message.empty()) {
        if (const size_t quoted = quoted_length(out.empty() ? ' ' : out.back(), message); quoted > 0) {
            out += message.substr(0, quoted);
            message.remove_prefix(quoted);
            continue;
        }
        size_t length = 0;
        while (length < message.size() && is_name_part(message[length])) ++length;
        const std::string_view word = message.substr(0, length);
        const bool free =
            out.empty() || std::string_view(" \n(,;").find(out.back()) != std::string_view::npos;
        const auto found = free ? typed_names().find(word) : typed_names().end();
        out += found != typed_names().end() ? std::string_view(found->second) : word;
        message.remove_prefix(length);
        if (message.empty()) break;
        out += message.front();
        message.remove_prefix(1);
    }
    return out;
}

}  // namespace quern
