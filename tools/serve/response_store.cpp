#include "tools/serve/response_store.h"

#include <utility>
#include <vector>

#include "tools/common/fields.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr size_t kMaxTurns = 4096;

}  // namespace

void ResponseStore::put(const std::string& owner, std::shared_ptr<const Entry> before,
                        const ordered_json& items, const ordered_json& response) {
    auto entry = std::make_shared<Entry>(Entry{.owner = owner,
                                               .id = response.value("id", ""),
                                               .items = dump(items),
                                               .response = dump(response),
                                               .before = std::move(before),
                                               .end = Clock::now() + lifetime_});
    entry->bytes = sizeof(Entry) + entry->items.size() + entry->response.size() +
                   (entry->before != nullptr ? entry->before->bytes : 0);
    entry->turns += entry->before != nullptr ? entry->before->turns : 0;
    if (entry->bytes > max_bytes_ || entry->turns > kMaxTurns) return;
    const std::lock_guard lock(mutex_);
    bytes_ += entry->bytes;
    by_id_[entry->id] = entries_.insert(entries_.end(), entry);
    drop_old();
}

std::shared_ptr<const ResponseStore::Entry> ResponseStore::find(const std::string& id,
                                                                const std::string& owner) {
    const std::lock_guard lock(mutex_);
    drop_old();
    const auto found = by_id_.find(id);
    return found != by_id_.end() && (*found->second)->owner == owner ? *found->second : nullptr;
}

bool ResponseStore::erase(const std::string& id, const std::string& owner) {
    const std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    if (found == by_id_.end() || (*found->second)->owner != owner) return false;
    drop(found->second);
    return true;
}

void ResponseStore::drop(Entries::iterator at) {
    bytes_ -= (*at)->bytes;
    by_id_.erase((*at)->id);
    entries_.erase(at);
}

void ResponseStore::drop_old() {
    const auto now = Clock::now();
    while (!entries_.empty() && (bytes_ > max_bytes_ || entries_.front()->end < now)) drop(entries_.begin());
}

ordered_json ResponseStore::conversation(const Entry& last) {
    std::vector<const Entry*> turns;
    for (const Entry* e = &last; e != nullptr; e = e->before.get()) turns.push_back(e);
    ordered_json out = ordered_json::array();
    const auto add = [&](const ordered_json& items) {
        for (const ordered_json& item : items) out.push_back(item);
    };
    for (auto turn = turns.rbegin(); turn != turns.rend(); ++turn) {
        add(ordered_json::parse((*turn)->items));
        add(ordered_json::parse((*turn)->response)["output"]);
    }
    return out;
}

}  // namespace quern
