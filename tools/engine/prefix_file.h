// PrefixFile: the states of a prefix cache in a file, for the next process.
//
// One file for each model and layout, written whole under a temporary name, made durable and renamed: a crash
// at any moment leaves the file before or the file after. Records, the most valuable state first, each with a
// checksum; KV pages that states share are written once. What is damaged is not used. The file holds the
// tokens of conversations: only its owner may read it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tools/engine/prefix_cache.h"
#include "tools/engine/state_pool.h"

namespace quern {

class PrefixFile {
  public:
    /// `binding`: a hash of all that a state depends on. Makes the directory if need be; removes what a
    /// process that died while it wrote this file has left. Throws Error(runtime) if there can be no such
    /// directory.
    PrefixFile(const std::string& directory, uint64_t binding);

    /// Adds states to the cache until its budget, the pages or the file end. Returns a remark for people if
    /// something was wrong with the file, which is then removed, unless it is not one of ours.
    std::string load(PrefixCache& cache, StatePool& pool) const;
    /// Replaces the file. False: `go_on`, asked again and again, said no, and the file is as before. Throws
    /// Error(runtime) if it cannot be written or is not one of ours.
    bool save(const PrefixCache& cache, const StatePool& pool, const std::function<bool()>& go_on) const;

    const std::string& path() const { return path_; }

  private:
    std::string path_;
    uint64_t binding_;
};

}  // namespace quern
