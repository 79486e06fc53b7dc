// Flags of a subcommand in llama.cpp's spelling, on top of CLI11.
//
// CLI11 2.1 cannot register -ngl, reads `-ngl 99` as `-n gl`, keeps the '=' of `-p=hi` and refuses repeated
// scalars. So argv is first normalised by the table of flags given here: every flag becomes its long name,
// followed by its value as a separate argument, which is never looked into. Environment variables
// QUERN_ARG_<LONG_NAME> come first, so that the command line wins.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

class ArgParser {
  public:
    /// `usage`: what follows "quern <command>" in the first line of --help.
    ArgParser(std::string command, std::string summary, std::string usage);

    using Setter = std::function<void(const std::string&)>;

    /// A heading in --help for the flags that follow.
    void section(std::string title);
    /// `names`: comma separated, short ones first: "-c,--ctx-size". The last of repeated flags wins.
    void value(const std::string& names, std::string value_name, std::string help, Setter set);
    /// As `value`; set is called for every occurrence.
    void values(const std::string& names, std::string value_name, std::string help, Setter set);
    /// A flag without a value; "!--no-x" among the names means false.
    void toggle(const std::string& names, std::string help, std::function<void(bool)> set);
    /// Accepted without effect. `choices`: values that may follow it, if any.
    void ignored(const std::string& names, std::string help, std::vector<std::string> choices = {});
    /// At most one, optional.
    void positional(std::string name, std::string help, Setter set);
    /// Printed under the flags: exit codes, examples.
    void footer(std::string text);

    /// False: --help or --version was printed. Throws Error(usage) naming the flag and the nearest one that exists.
    /// Warnings (unknown QUERN_ARG_*) go to stderr.
    bool parse(int argc, char** argv);

    /// The two halves of parse, for tests. `environment`: "NAME=value" strings.
    std::vector<std::string> normalise(const std::vector<std::string>& args);
    std::vector<std::string> from_environment(const std::vector<std::string>& environment,
                                              std::vector<std::string>* warnings);
    void apply(const std::vector<std::string>& normalised);
    std::string help() const;

  private:
    enum class Kind { value, values, toggle, ignored };
    struct Flag {
        Kind kind;
        std::vector<std::string> names;     // as shown in --help, with dashes
        std::vector<std::string> negative;  // the "!--no-x" names
        std::string canonical;              // what CLI11 knows it by, without dashes
        std::string value_name;
        std::string help;
        std::vector<std::string> choices;
        size_t section;
        Setter set;
        std::function<void(bool)> set_bool;
        std::string typed = {};  // the name by which it was given
        bool takes_value() const { return kind == Kind::value || kind == Kind::values; }
    };

    void add(Flag flag, const std::string& names);
    Flag* find(std::string_view name, bool* negative);
    std::vector<std::string> all_names() const;
    void normalise_flag(const std::vector<std::string>& args, size_t& i, std::vector<std::string>& out);
    void remember_names() const;
    void append_flag(const Flag& flag, bool negative, std::vector<std::string>& out) const;
    void append_help(const Flag& flag, std::string& out) const;

    std::string command_, summary_, usage_, footer_;
    std::string positional_name_, positional_help_;
    Setter positional_set_;
    std::vector<std::string> sections_;
    std::vector<Flag> flags_;
};

/// The message of an error with flags named as they were typed (or set in the environment) in this process: "-tp: expected"
/// becomes "--tensor-parallel-size: expected". Names in quotes stay.
std::string in_typed_names(std::string_view message);

}  // namespace quern
