// Error: the one exception type of quern.
//
// Messages name the thing, what was expected, what was found and what to do. `kind` is the process exit
// code that the command line maps the error to (README, "Exit codes").
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace quern {

enum class ErrorKind : int {
    runtime = 1,   // anything else: I/O, internal contract broken
    usage = 2,     // the command line or a request asks for something impossible
    model = 3,     // the checkpoint is invalid or not understood
    memory = 4,    // does not fit
    device = 5,    // no suitable GPU or driver
    too_long = 6,  // prompt longer than the context
    bind = 7,      // port or address not available
};

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, std::string message, const char* file = "", int line = 0)
        : std::runtime_error(std::move(message)), kind_(kind), file_(file), line_(line) {}

    ErrorKind kind() const { return kind_; }
    int exit_code() const { return static_cast<int>(kind_); }
    /// Where it was thrown, for bug reports; empty file when not known.
    const char* file() const { return file_; }
    int line() const { return line_; }

  private:
    ErrorKind kind_;
    const char* file_;
    int line_;
};

}  // namespace quern
