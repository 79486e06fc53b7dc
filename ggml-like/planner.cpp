#include "ggml-like/planner.h"

#include <algorithm>
#include <unordered_map>

#include "ggml-like/check.h"

namespace quern {
namespace {

int64_t align(int64_t bytes) { return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment; }

struct Lifetime {
    int first = -1;  // node that writes it
    int last = -1;   // last node that touches it
};

class Lifetimes {
  public:
    explicit Lifetimes(const Graph& graph) : graph_(graph), lifetimes_(graph.tensors().size()) {
        int32_t index = 0;  // of the base, for views
        for (const Tensor& t : graph.tensors()) {
            index_of_[&t] = t.base >= 0 ? t.base : index;
            ++index;
        }
        const int end = static_cast<int>(graph.nodes().size());
        for (int n = 0; n < end; ++n) visit(n);
        for (const Tensor* t : graph.outputs()) lifetimes_[index_of_.at(t)].last = end;
        for (size_t i = 0; i < lifetimes_.size();
             ++i)  // zeros are there from the beginning, and nobody else's
            if (graph.tensors()[i].zeroed && lifetimes_[i].first >= 0) lifetimes_[i] = {0, end};
    }

    const std::vector<Lifetime>& all() const { return lifetimes_; }

  private:
    void visit(int n) {
        const Node& node = graph_.nodes()[static_cast<size_t>(n)];
        for (const Tensor* t : node.inputs) touch(node, t, n, false);
        for (const Tensor* t : node.outputs) touch(node, t, n, true);
    }

    void touch(const Node& node, const Tensor* t, int n, bool write) {
        const int32_t index = index_of_.at(t);
        const Tensor& owner = graph_.tensors()[static_cast<size_t>(index)];
        if (owner.place != Place::scratch && owner.place != Place::output) return;
        Lifetime& life = lifetimes_[static_cast<size_t>(index)];
        if ((write || owner.zeroed) && life.first < 0) life.first = n;
        CHECK(life.first >= 0, "[planner] {} reads {} before any node writes it", node.name, describe(*t));
        life.last = n;
    }

    const Graph& graph_;
    std::vector<Lifetime> lifetimes_;
    std::unordered_map<const Tensor*, int32_t> index_of_;
};

/// First fit among tensors whose lifetimes overlap, from byte `begin` on.
class Arena {
  public:
    Arena(size_t nodes, int64_t begin) : begin_(begin), at_(nodes + 1) {
        for (auto& list : at_) list.reserve(16);
    }

    /// The offset of a tensor of so many bytes.
    int64_t place(int64_t bytes, Lifetime life) {
        taken_.clear();
        for (int node = life.first; node <= life.last; ++node)
            for (const Range& r : at_[static_cast<size_t>(node)])
                if (node == std::max(life.first, r.first_node)) taken_.push_back(r);  // each once
        std::sort(taken_.begin(), taken_.end(),
                  [](const Range& a, const Range& b) { return a.begin < b.begin; });
        int64_t offset = begin_;
        for (const Range& r : taken_) {
            if (offset + bytes <= r.begin) break;
            offset = std::max(offset, r.end);
        }
        for (int node = life.first; node <= life.last; ++node)
            at_[static_cast<size_t>(node)].push_back({offset, offset + bytes, life.first});
        return offset;
    }

  private:
    struct Range {
        int64_t begin, end;
        int first_node;
    };
    int64_t begin_;
    std::vector<std::vector<Range>> at_;  // what lives at each node
    std::vector<Range> taken_;
};

}  // namespace

ArenaPlan plan_memory(const Graph& graph) {
    const auto& tensors = graph.tensors();
    ArenaPlan plan;
    plan.offset.assign(tensors.size(), -1);
    plan.input_offset.assign(tensors.size(), -1);

    const Lifetimes lifetimes(graph);
    std::vector<size_t> order;
    std::vector<int64_t> size(tensors.size(), 0);  // bytes of those in `order`
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& t = tensors[i];
        if (t.base >= 0) continue;
        if (t.place == Place::input) {
            plan.input_offset[i] = plan.input_bytes;
            plan.input_bytes += align(t.bytes());
        } else if (lifetimes.all()[i].first >= 0) {
            order.push_back(i);
            size[i] = t.bytes();
        }
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return size[a] > size[b]; });

    // Zeros live all the time: side by side at the beginning. Of the others the biggest come first, which wastes least.
    const auto zeroed = [&](size_t i) { return tensors[i].zeroed; };
    const auto rest = std::stable_partition(order.begin(), order.end(), zeroed);
    for (auto i = order.begin(); i != rest; ++i) {
        plan.offset[*i] = plan.zero_bytes;
        plan.zero_bytes += align(size[*i]);
    }
    plan.arena_bytes = plan.zero_bytes;
    Arena arena(graph.nodes().size(), plan.zero_bytes);
    for (auto i = rest; i != order.end(); ++i) {
        const int64_t bytes = align(size[*i]);
        plan.offset[*i] = arena.place(bytes, lifetimes.all()[*i]);
        plan.arena_bytes = std::max(plan.arena_bytes, plan.offset[*i] + bytes);
    }
    return plan;
}

}  // namespace quern
