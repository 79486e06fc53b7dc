// ResponseStore: responses that clients may go on from, or ask for again, for a while.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ggml-like/json.h"

namespace quern {

/// In memory only, within a number of bytes: of too many the oldest go. Others than the `owner` of a response, whose
/// API key asked for it, see nothing of it. Thread-safe.
class ResponseStore {
  public:
    using Clock = std::chrono::steady_clock;

    /// As text, which is smaller than a tree.
    struct Entry {
        std::string owner, id, items, response;  // items: the input, without that of earlier responses
        std::shared_ptr<const Entry> before;
        size_t bytes = 0, turns = 1;  // with all before
        Clock::time_point end;
    };

    ResponseStore(size_t max_bytes, std::chrono::seconds lifetime)
        : max_bytes_(max_bytes), lifetime_(lifetime) {}

    void put(const std::string& owner, std::shared_ptr<const Entry> before,
             const nlohmann::ordered_json& items, const nlohmann::ordered_json& response);
    /// Null: there is none, or not any more.
    std::shared_ptr<const Entry> find(const std::string& id, const std::string& owner);
    bool erase(const std::string& id, const std::string& owner);

    /// Input and output items of the response and all before it, the first one first.
    static nlohmann::ordered_json conversation(const Entry& last);

  private:
    using Entries = std::list<std::shared_ptr<const Entry>>;  // the oldest first
    void drop(Entries::iterator at);
    void drop_old();

    size_t max_bytes_, bytes_ = 0;
    std::chrono::seconds lifetime_;
    std::mutex mutex_;
    Entries entries_;
    std::map<std::string, Entries::iterator> by_id_;
};

}  // namespace quern
