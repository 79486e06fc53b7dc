// PrefixFile: the states of a prefix cache in a file, for the next process.
//
// One file for each model and layout, written under a temporary name, made durable and renamed: after a crash at any
// moment there is the old file or the new one. It has a record for each state, the most valuable first, each with a
// checksum; KV pages that states share are written once. Damaged records are not used. The file holds the tokens of
// conversations, so only its owner may read it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tools/engine/prefix_cache.h"

namespace quern {

class PrefixFile {
  public:
    /// `binding`: a hash of all that a state depends on. Makes the directory if there is none, and removes a temporary
    /// file that a process left when it died. Throws Error(usage) if the directory cannot be made or,
    /// where there are no states yet, written to.
    PrefixFile(const std::string& directory, uint64_t binding);

    /// Adds states to the cache until its memory or the file ends. If the file is bad, returns a remark for
    /// people and removes it, unless it is not one of ours.
    std::string load(PrefixCache& cache) const;
    /// Replaces the file. Returns false if `go_on` cancels; it is polled, and the old file stays. Throws Error(runtime)
    /// if it cannot be written or is not one of ours.
    bool save(PrefixCache& cache, const std::function<bool()>& go_on) const;

    const std::string& path() const { return path_; }

  private:
    std::string path_;
    uint64_t binding_;
};

}  // namespace quern
