// Output: text to a file descriptor, unbuffered. A reader that has gone is told apart from other errors.
#pragma once

#include <string>
#include <string_view>

namespace quern {

class Output {
  public:
    explicit Output(int fd) : fd_(fd) {}

    /// Writes everything, waiting if the descriptor is non-blocking. False once the reader has gone away
    /// (EPIPE): nothing more can be written. Throws Error(runtime) for other failures, such as a full disk.
    bool write(std::string_view text);
    bool closed() const { return closed_; }
    bool is_terminal() const;
    /// The last byte written; '\n' before the first.
    char last() const { return last_; }

  private:
    int fd_;
    bool closed_ = false;
    char last_ = '\n';
};

/// Writes to standard output what a command was asked to print: its help, its version. As Output::write; a reader that has
/// gone is no error.
void print(std::string_view text);

/// Writes a note of the program itself to stderr. Ignores failures: there is nowhere to report them.
void note(std::string_view text);

/// Makes sure descriptors 0 to 2 are open, so that no file opened later gets their numbers. A closed stdout becomes
/// one that cannot be written to, which the first write reports.
void open_standard_descriptors();

}  // namespace quern
