// Signals of an interactive program: the first Ctrl-C asks, the second one ends the process, and the terminal is
// always left as it was.
#pragma once

namespace quern {

constexpr int kExitTruncated = 8;      // --fail-on-truncation
constexpr int kExitTimeout = 124;      // --timeout
constexpr int kExitInterrupted = 130;  // SIGINT
constexpr int kExitPipe = 141;         // SIGPIPE: the reader of stdout has gone
constexpr int kExitTerminated = 143;   // SIGTERM, SIGHUP

class Signals {
  public:
    /// Installs the handlers and remembers the terminal's settings. Until `polite(true)`, SIGINT and SIGTERM
    /// end the process at once. One instance at a time.
    Signals();
    /// Restores handlers and terminal.
    ~Signals();
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    /// True: signals only set what the functions below report; a second SIGINT or SIGTERM before the first one was
    /// taken still ends the process.
    void polite(bool on);
    /// Whether Ctrl-C came since the last call.
    bool take_interrupt();
    /// Whether Ctrl-C came and was not taken yet.
    bool interrupted() const;
    /// 143 once SIGTERM or SIGHUP came, else 0.
    int terminated() const;
    bool take_resize();
    /// Whether Ctrl-Z came while catch_stop was on: the line editor must restore the terminal before stopping.
    bool take_stop();
    void catch_stop(bool on);
    /// While `on`, the terminal does not show what is typed, nor ^C; while the process is stopped (Ctrl-Z) it does. Not
    /// together with catch_stop.
    void quiet(bool on);
    /// Becomes readable when a signal arrives.
    int wake_fd() const;
    /// Empties wake_fd.
    void drain();
    /// Stops the process like SIGTSTP; returns when it is continued.
    void stop_self();
};

/// A terminal that is quiet for a while.
class QuietTerminal {
  public:
    explicit QuietTerminal(Signals& signals) : signals_(signals) { signals_.quiet(true); }
    ~QuietTerminal() { signals_.quiet(false); }
    QuietTerminal(const QuietTerminal&) = delete;
    QuietTerminal& operator=(const QuietTerminal&) = delete;

  private:
    Signals& signals_;
};

}  // namespace quern
