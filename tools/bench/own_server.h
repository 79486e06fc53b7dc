// A server of one's own, for as long as it is measured.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace quern {

class OwnServer {
  public:
    /// Runs this program as `serve FLAGS...` on a free port of this machine and waits until it answers. Throws Error(runtime) with
    /// its last words if it does not.
    explicit OwnServer(const std::vector<std::string>& flags);
    ~OwnServer();
    OwnServer(const OwnServer&) = delete;
    OwnServer& operator=(const OwnServer&) = delete;

    const std::string& url() const { return url_; }

  private:
    void stop();

    pid_t pid_ = -1;
    int said_ = -1;  // what it writes to stderr
    std::string url_;
};

}  // namespace quern
