// Mailboxes: the memory of peers.h that ranks write into, one for each.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml-like/cuda/comm/peers.h"

namespace quern::cuda::comm {

/// Where a mailbox lies: in the memory of its GPU, which the others write into over NVLink or PCIe; or in pinned memory of the
/// host, which every GPU can reach.
enum class Link : uint8_t { peer_access, host_memory };

/// Why these GPUs cannot write into each other's memory: "GPU 1 cannot write into the memory of GPU 0"; empty if they can.
std::string no_peer_access(const std::vector<int>& devices);
/// Throws Error(device) unless all are cards of one kind: others round otherwise.
void require_one_kind(const std::vector<int>& devices);
/// The same of their names. Pure, for tests.
void require_one_kind(const std::vector<int>& devices, const std::vector<std::string>& names);

class Mailboxes {
  public:
    /// One for each of `devices`. With Link::peer_access no_peer_access() must be empty.
    Mailboxes(const std::vector<int>& devices, Link link);
    ~Mailboxes();
    Mailboxes(const Mailboxes&) = delete;
    Mailboxes& operator=(const Mailboxes&) = delete;

    Link link() const { return link_; }
    BoxLayout layout() const { return {static_cast<int64_t>(devices_.size())}; }
    /// As every GPU sees it.
    std::byte* of(int rank) const { return boxes_[static_cast<size_t>(rank)]; }
    /// Empties all. Nothing may run on the GPUs.
    void clear();

  private:
    void enable_access() const;

    const std::vector<int> devices_;
    const Link link_;
    std::vector<std::byte*> boxes_;
};

}  // namespace quern::cuda::comm
