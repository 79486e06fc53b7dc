#include "tools/engine/prefix_file.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <unordered_map>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "tools/engine/atomic_file.h"
#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

struct Header {
    char magic[8];
    uint64_t binding;
    int64_t page_bytes, recurrent_bytes, records;
};
/// The last character is the format's version: since 2 states are at multiples of kPageTokens, of prompts only.
constexpr char kMagic[8] = {'Q', 'U', 'E', 'R', 'N', 'P', 'F', '3'};
constexpr size_t kOurs = sizeof kMagic - 1;

/// Then tokens, page numbers in the file, the bytes of pages that no earlier record has, the recurrent state,
/// and the hash of all that.
struct RecordHeader {
    int64_t length, saved, pages, fresh_pages;
};

class Writer {
  public:
    explicit Writer(AtomicFile& file) : file_(file) {}
    void write(const void* data, size_t bytes) {
        file_.write(data, bytes);
        hash_.add(data, bytes);
    }
    void end_record() {
        const uint64_t value = hash_.value();
        file_.write(&value, sizeof value);
        hash_ = {};
    }

  private:
    AtomicFile& file_;
    ContentHash hash_;
};

class Reader {
  public:
    explicit Reader(const std::string& path) : file_(path, std::ios::binary) {
        std::error_code failed;
        left_ = fs::file_size(path, failed);
        if (failed) left_ = 0;
    }
    bool read(void* to, size_t bytes) {
        if (bytes > left_ || !file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes)))
            return false;
        left_ -= bytes;
        hash_.add(to, bytes);
        return true;
    }
    /// A list whose length is in the file, but at most as long as the rest of the file.
    template <typename T>
    bool read(std::vector<T>& to, int64_t count) {
        if (count < 0 || static_cast<uint64_t>(count) > left_ / sizeof(T)) return false;
        to.resize(static_cast<size_t>(count));
        return read(to.data(), to.size() * sizeof(T));
    }
    bool end_record() {
        const uint64_t expected = hash_.value();
        uint64_t found = 0;
        const bool good = read(&found, sizeof found) && found == expected;
        hash_ = {};
        return good;
    }
    bool at_end() const { return left_ == 0; }

  private:
    std::ifstream file_;
    uint64_t left_ = 0;
    ContentHash hash_;
};

enum class Kind { none, ours, foreign };

Kind kind_of(const std::string& path) {
    std::error_code failed;
    if (!fs::exists(fs::symlink_status(path, failed))) return Kind::none;
    if (!fs::is_regular_file(path, failed)) return Kind::foreign;
    char magic[kOurs] = {};
    std::ifstream file(path, std::ios::binary);
    file.read(magic, sizeof magic);
    // One that was cut off within the first word, or to nothing, is ours too.
    const auto found = static_cast<size_t>(file.gcount());
    return std::memcmp(magic, kMagic, found) == 0 ? Kind::ours : Kind::foreign;
}

/// Removes temporary files NAME.PID.tmp of processes that are gone; one with our own PID is from an earlier process.
void remove_leftovers(const fs::path& directory, const std::string& name) {
    std::error_code failed;
    for (const auto& file : fs::directory_iterator(directory, failed)) {
        const std::string found = file.path().filename().string();
        if (found.compare(0, name.size() + 1, name + ".") != 0) continue;
        pid_t pid = 0;
        const char* end = found.data() + found.size();
        const auto [rest, error] = std::from_chars(found.data() + name.size() + 1, end, pid);
        if (error != std::errc{} || pid <= 0 ||
            std::string_view(rest, static_cast<size_t>(end - rest)) != ".tmp")
            continue;
        const bool gone = pid == ::getpid() || (::kill(pid, 0) != 0 && errno == ESRCH);
        if (gone) fs::remove(file.path(), failed);
    }
}

/// Reads records into the cache. False: the file is damaged; what came before is in the cache.
class Loader {
  public:
    Loader(Reader& reader, PrefixCache& cache)
        : reader_(reader),
          cache_(cache),
          memory_(cache.memory()),
          recurrent_(static_cast<size_t>(memory_.recurrent_bytes())) {}
    ~Loader() { memory_.drop(pages_); }

    bool run(int64_t records) {
        for (int64_t i = 0; i < records && !full_; ++i)
            if (!record()) return false;
        return full_ || reader_.at_end();
    }

  private:
    bool record() {
        RecordHeader h{};
        if (!reader_.read(&h, sizeof h) || h.length <= 0 || !at_page_end(h.length)) return false;
        std::vector<int32_t> tokens, numbers;
        if (!reader_.read(tokens, h.length) || !reader_.read(numbers, h.pages)) return false;
        if (h.pages != h.length / kPageTokens) return false;
        if (h.fresh_pages < 0 || h.fresh_pages > h.pages) return false;
        if (!memory_.make_free(h.fresh_pages + memory_.recurrent_blocks())) return full_ = true;
        const std::vector<int32_t> fresh = memory_.take(h.fresh_pages);
        pages_.insert(pages_.end(), fresh.begin(), fresh.end());
        for (const int32_t number : fresh)
            for (const StatePool::Part& part : memory_.parts(number))
                if (!reader_.read(part.data, static_cast<size_t>(part.bytes))) return false;
        HostStates::State state{.length = h.length, .recurrent = memory_.take(memory_.recurrent_blocks())};
        if (!reader_.read(recurrent_.data(), recurrent_.size()) || !reader_.end_record() ||
            !fill(state, numbers)) {
            memory_.release(state);
            return false;
        }
        memory_.write_recurrent(state, recurrent_.data());
        cache_.adopt(std::move(tokens), std::move(state), h.saved);
        return true;
    }
    bool fill(HostStates::State& state, const std::vector<int32_t>& numbers) {
        for (const int32_t number : numbers) {
            if (number < 0 || static_cast<size_t>(number) >= pages_.size()) return false;
            state.pages.push_back(memory_.share(pages_[static_cast<size_t>(number)]));
        }
        return true;
    }

    Reader& reader_;
    PrefixCache& cache_;
    HostStates& memory_;
    std::vector<std::byte> recurrent_;
    std::vector<int32_t> pages_;  // every page of the file so far
    bool full_ = false;
};

/// A state whose blocks stay as they are while it is written.
class Held {
  public:
    Held(PrefixCache& cache, const PrefixCache::Kept& kept) : cache_(cache), state_(cache.hold(kept)) {}
    ~Held() {
        if (state_) cache_.let_go(*state_);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    const std::optional<HostStates::State>& get() const { return state_; }

  private:
    PrefixCache& cache_;
    std::optional<HostStates::State> state_;
};

}  // namespace

PrefixFile::PrefixFile(const std::string& directory, uint64_t binding) : binding_(binding) {
    std::error_code failed;
    const bool made = fs::create_directories(directory, failed);
    const std::string reason = failed.message();
    if (made) fs::permissions(directory, fs::perms::owner_all, failed);
    if (fs::exists(directory, failed) && !fs::is_directory(directory, failed))
        FAIL(usage, "--cache-dir {}: this is no directory; name one, or a path where one can be made",
             directory);
    if (!fs::is_directory(directory, failed))
        FAIL(usage, "--cache-dir {}: there is no such directory, and it cannot be made: {}", directory,
             reason);
    const std::string name = fmt::format("quern-states-{:016x}", binding);
    path_ = (fs::path(directory) / name).string();
    remove_leftovers(directory, name);
    if (kind_of(path_) != Kind::none)
        return;  // load() says what is there; a directory may be for reading only
    try {
        const AtomicFile tried(path_, 0600);  // goes again at once
    } catch (const Error& error) {
        FAIL(usage, "--cache-dir {}: states could not be saved there: {}", directory, error.what());
    }
}

std::string PrefixFile::load(PrefixCache& cache) const {
    const Kind kind = kind_of(path_);
    if (kind == Kind::none) return {};
    if (kind == Kind::foreign)
        return path_ + " is no file of quern's: it is left alone, and no states are kept";
    Reader reader(path_);
    Header h{};
    const bool known = reader.read(&h, sizeof h) && std::memcmp(h.magic, kMagic, sizeof kMagic) == 0 &&
                       h.binding == binding_ && h.page_bytes == cache.memory().page_bytes() &&
                       h.recurrent_bytes == cache.memory().recurrent_bytes() && reader.end_record();
    if (known && Loader(reader, cache).run(h.records)) return {};
    ::unlink(path_.c_str());
    return path_ + (known ? " is damaged" : " is of another model or version") +
           ": removed; what was good is used";
}

bool PrefixFile::save(PrefixCache& cache, const std::function<bool()>& go_on) const {
    if (kind_of(path_) == Kind::foreign) FAIL(runtime, "{} is no file of quern's", path_);
    AtomicFile file(path_, 0600);
    Writer writer(file);
    HostStates& memory = cache.memory();
    cache.settle(true);
    memory.finish();
    const std::vector<PrefixCache::Kept> states = cache.by_worth();
    Header header{.magic = {},
                  .binding = binding_,
                  .page_bytes = memory.page_bytes(),
                  .recurrent_bytes = memory.recurrent_bytes(),
                  .records = static_cast<int64_t>(states.size())};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    writer.write(&header, sizeof header);
    writer.end_record();

    std::vector<std::byte> recurrent(static_cast<size_t>(memory.recurrent_bytes()));
    std::unordered_map<int32_t, int32_t> number_of;  // block -> page in the file
    for (const PrefixCache::Kept& kept : states) {
        // Another replica may run, and give it up; the next save will have what there is then.
        const Held state(cache, kept);
        if (!state.get()) return false;
        const std::vector<int32_t>& tokens = kept.entry->tokens;
        std::vector<int32_t> numbers, fresh;
        for (const int32_t page : state.get()->pages) {
            const auto [at, is_new] = number_of.emplace(page, static_cast<int32_t>(number_of.size()));
            numbers.push_back(at->second);
            if (is_new) fresh.push_back(page);
        }
        const RecordHeader record{.length = state.get()->length,
                                  .saved = kept.saved,
                                  .pages = static_cast<int64_t>(numbers.size()),
                                  .fresh_pages = static_cast<int64_t>(fresh.size())};
        writer.write(&record, sizeof record);
        writer.write(tokens.data(), tokens.size() * sizeof(int32_t));
        writer.write(numbers.data(), numbers.size() * sizeof(int32_t));
        for (const int32_t page : fresh) {
            if (!go_on()) return false;
            for (const StatePool::Part& part : memory.parts(page))
                writer.write(part.data, static_cast<size_t>(part.bytes));
        }
        if (!go_on()) return false;
        memory.read_recurrent(*state.get(), recurrent.data());
        writer.write(recurrent.data(), recurrent.size());
        writer.end_record();
    }
    if (!go_on()) return false;
    file.commit();
    return true;
}

}  // namespace quern
