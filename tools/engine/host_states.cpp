#include "tools/engine/host_states.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "ggml-like/check.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/stage_marks.h"

namespace quern {
namespace {

/// Of a pool without pages a block is one piece that has room for a recurrent part.
std::vector<int64_t> part_sizes(const StatePool& pool) {
    std::vector<int64_t> sizes;
    for (const StatePool::Part& part : pool.page_parts()) sizes.push_back(part.bytes);
    if (sizes.empty()) sizes.push_back(std::max<int64_t>(pool.recurrent_bytes(), 1));
    return sizes;
}

}  // namespace

HostStates::HostStates(Backend& backend, StatePool& pool, int64_t budget)
    : HostStates(backend, pool, std::make_shared<HostBlocks>(part_sizes(pool), backend.ranks(), budget)) {}

HostStates::HostStates(Backend& backend, StatePool& pool, std::shared_ptr<HostBlocks> blocks)
    : backend_(backend), pool_(pool), blocks_(std::move(blocks)) {
    CHECK(blocks_->parts() == part_sizes(pool), "[cache] engines of different layouts share states");
}

HostStates::~HostStates() {
    try {
        backend_.finish_saves();
    } catch (const std::exception&) {  // the device has failed, which was reported
    }
}

int64_t HostStates::recurrent_blocks() const {
    return (pool_.recurrent_bytes() + blocks_->rank_bytes() - 1) / blocks_->rank_bytes();
}

int64_t HostStates::most_blocks(int64_t length) const { return length / kPageTokens + recurrent_blocks(); }

bool HostStates::is_copy(const StatePool::Copy& copy) const {
    return copy.block >= 0 && blocks_->is_held(copy.block, copy.serial);
}

int64_t HostStates::fresh_blocks(const std::vector<int32_t>& pages, int64_t length) {
    int64_t fresh = most_blocks(length);
    for (int64_t i = 0; i < pool_.final_pages(length); ++i)
        fresh -= is_copy(pool_.copy_of(pages[static_cast<size_t>(i)]));
    return fresh;
}

std::vector<int32_t> HostStates::take(int64_t blocks) {
    std::vector<int32_t> taken;
    for (int64_t i = 0; i < blocks; ++i) taken.push_back(blocks_->take());
    return taken;
}

void HostStates::drop(std::vector<int32_t>& blocks) {
    dropped_ |= !blocks.empty();
    blocks_->drop(blocks);
}

/// One device copies to and from host memory in an order. Several do not know of each other: what one copies to a block that was
/// dropped may be overtaken by what another still copies to or from it. So the copies end before such a block is used.
void HostStates::await_stages() {
    if (backend_.stages() == 1 || !std::exchange(dropped_, false)) return;
    backend_.finish_saves();
    for (int s = 0; s < backend_.stages(); ++s) backend_.of_stage(s).await_mark(kLoadsMark);
}

HostStates::State HostStates::share(const State& state) {
    for (const int32_t block : state.pages) share(block);
    for (const int32_t block : state.recurrent) share(block);
    return state;
}

void HostStates::release(State& state) {
    drop(state.pages);
    drop(state.recurrent);
    state.length = 0;
}

std::vector<StatePool::Part> HostStates::parts(int32_t number) const {
    std::vector<StatePool::Part> out;
    for (int rank = 0; rank < backend_.ranks(); ++rank)
        for (size_t part = 0; part < blocks_->parts().size(); ++part)
            out.push_back({static_cast<std::byte*>(backend_.memory_of(rank, blocks_->place(number, part))),
                           blocks_->parts()[part]});
    return out;
}

/// Pages that are neighbours in the pool and in host memory are one copy for each part.
std::vector<BlockCopy> HostStates::page_copies(std::span<const int32_t> pages,
                                               std::span<const int32_t> blocks, Direction direction) const {
    std::vector<BlockCopy> copies;
    const std::vector<StatePool::Part> own = pool_.page_parts();
    for (size_t begin = 0, end = 0; begin < pages.size(); begin = end) {
        const size_t most = begin + blocks_->run_length(blocks.subspan(begin));
        for (end = begin + 1; end < most && pages[end] == pages[end - 1] + 1; ++end) {
        }
        for (size_t part = 0; part < own.size(); ++part) {
            std::byte* host = blocks_->place(blocks[begin], part);
            std::byte* here = own[part].data + pages[begin] * own[part].bytes;
            const int64_t bytes = static_cast<int64_t>(end - begin) * own[part].bytes;
            const bool out = direction == Direction::to_host;
            copies.push_back({out ? host : here, out ? here : host, bytes, bytes, bytes, 1});
        }
    }
    return copies;
}

/// The memory of these blocks in large pieces, for what is no page.
std::vector<StatePool::Part> HostStates::stretches(std::span<const int32_t> blocks) const {
    std::vector<StatePool::Part> out;
    for (size_t begin = 0; begin < blocks.size();) {
        const size_t count = blocks_->run_length(blocks.subspan(begin));
        for (size_t part = 0; part < blocks_->parts().size(); ++part)
            out.push_back(
                {blocks_->place(blocks[begin], part), static_cast<int64_t>(count) * blocks_->parts()[part]});
        begin += count;
    }
    return out;
}

std::vector<BlockCopy> HostStates::recurrent_copies(std::span<const StatePool::Part> parts,
                                                    std::span<const int32_t> blocks,
                                                    Direction direction) const {
    std::vector<BlockCopy> copies;
    const std::vector<StatePool::Part> all = stretches(blocks);
    size_t stretch = 0;
    int64_t used = 0;  // of this stretch
    for (const StatePool::Part& part : parts)
        for (int64_t done = 0; done < part.bytes;) {
            if (used == all[stretch].bytes) {
                ++stretch;
                used = 0;
            }
            const int64_t bytes = std::min(part.bytes - done, all[stretch].bytes - used);
            std::byte* host = all[stretch].data + used;
            std::byte* own = part.data + done;
            const bool out = direction == Direction::to_host;
            copies.push_back({out ? host : own, out ? own : host, bytes, bytes, bytes, 1});
            used += bytes;
            done += bytes;
        }
    return copies;
}

/// The recurrent part of a state, of one rank after the other.
std::vector<StatePool::Part> HostStates::recurrent_parts(const State& state) const {
    std::vector<StatePool::Part> out;
    for (int rank = 0; rank < backend_.ranks(); ++rank) {
        int64_t left = pool_.recurrent_bytes();
        for (const StatePool::Part& s : stretches(state.recurrent)) {
            out.push_back(
                {static_cast<std::byte*>(backend_.memory_of(rank, s.data)), std::min(left, s.bytes)});
            left -= out.back().bytes;
        }
    }
    return out;
}

void HostStates::read_recurrent(const State& state, std::byte* to) const {
    for (const StatePool::Part& part : recurrent_parts(state)) {
        std::memcpy(to, part.data, static_cast<size_t>(part.bytes));
        to += part.bytes;
    }
}

void HostStates::write_recurrent(const State& state, const std::byte* from) const {
    for (const StatePool::Part& part : recurrent_parts(state)) {
        std::memcpy(part.data, from, static_cast<size_t>(part.bytes));
        from += part.bytes;
    }
}

HostStates::State HostStates::save(const std::vector<int32_t>& pages, int64_t length,
                                   std::span<const StatePool::Part> recurrent) {
    CHECK(at_page_end(length), "[cache] a state of {} tokens would be saved", length);
    await_stages();
    State state{.length = length, .pages = {}, .recurrent = take(recurrent_blocks())};
    std::vector<int32_t> fresh_pages, fresh_blocks;
    for (int64_t i = 0; i < length / kPageTokens; ++i) {
        const int32_t page = pages[static_cast<size_t>(i)];
        StatePool::Copy& copy = pool_.copy_of(page);
        const bool is_final = i < pool_.final_pages(length);
        if (is_final && is_copy(copy)) {
            state.pages.push_back(share(copy.block));
            continue;
        }
        const int32_t number = blocks_->take();
        if (is_final) copy = {number, blocks_->serial(number)};
        state.pages.push_back(number);
        fresh_pages.push_back(page);
        fresh_blocks.push_back(number);
    }
    backend_.save(page_copies(fresh_pages, fresh_blocks, Direction::to_host));
    backend_.save(recurrent_copies(recurrent, state.recurrent, Direction::to_host));
    return state;
}

HostStates::State HostStates::save(const Snapshot& from) {
    return save(from.pages, from.length, pool_.recurrent_parts(from));
}

HostStates::State HostStates::save(const SequenceState& from) {
    return save(from.pages, from.length, pool_.recurrent_parts(from.slot));
}

SequenceState HostStates::load(const State& state) {
    SequenceState s = pool_.acquire_for(state.length);
    backend_.load(page_copies(s.pages, state.pages, Direction::to_pool));
    backend_.load(recurrent_copies(pool_.recurrent_parts(s.slot), state.recurrent, Direction::to_pool));
    if (backend_.stages() > 1)  // await_stages waits for it
        for (int stage = 0; stage < backend_.stages(); ++stage) backend_.of_stage(stage).set_mark(kLoadsMark);
    for (int64_t i = 0; i < pool_.final_pages(state.length); ++i) {
        const int32_t number = state.pages[static_cast<size_t>(i)];
        pool_.copy_of(s.pages[static_cast<size_t>(i)]) = {number, blocks_->serial(number)};
    }
    return s;
}

}  // namespace quern
