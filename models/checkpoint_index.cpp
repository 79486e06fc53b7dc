#include "models/checkpoint_index.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"
#include "ggml-like/parallel.h"

namespace quern {
namespace {

constexpr uint64_t kMaxIndexBytes = 100'000'000;
constexpr size_t kMaxShards = 10'000;
constexpr size_t kEntryBytes = 128;  // of a name and its file, about
constexpr uint32_t kNotListed = 0xffffffffu;

void check_shard_name(JsonPull& json, std::string_view name) {
    if (name.find('/') != std::string_view::npos || name.find('\\') != std::string_view::npos ||
        name == ".." || name.find('\0') != std::string_view::npos || !name.ends_with(".safetensors")) {
        json.fail(
            fmt::format("'{}' is not the plain name of a .safetensors file beside the index", escaped(name)));
    }
}

void read_weight_map(JsonPull& json, CheckpointIndex& index) {
    json.expect('{', "as the value of weight_map");
    if (json.accept('}')) return;
    index.shard_of.reserve(index.text.size() / kEntryBytes);
    NameMap known;  // shard name -> position; views into the text or into `unescaped`
    std::string scratch;
    const auto keep = [&](std::string_view s) {
        return s.data() == scratch.data() ? std::string_view(index.unescaped.emplace_back(s)) : s;
    };
    do {
        const std::string_view tensor = keep(json.string(scratch, "as a tensor name in weight_map"));
        json.expect(':', "after a tensor name in weight_map");
        const std::string_view file = keep(json.string(scratch, "as a file name in weight_map"));
        const auto [shard, fresh] = known.emplace(file, static_cast<uint32_t>(known.size()));
        if (fresh) {
            check_shard_name(json, file);
            if (known.size() > kMaxShards) json.fail("too many shards");
            index.shards.emplace_back(file);
        }
        if (!index.shard_of.emplace(tensor, shard).second) {
            json.fail("tensor '" + escaped(tensor) + "' appears twice in weight_map");
        }
    } while (json.accept(','));
    json.expect('}', "at the end of weight_map, or ','");
}

void read_index_metadata(JsonPull& json, CheckpointIndex& index) {
    if (json.peek() != '{') return json.skip_value("as the value of metadata");
    json.expect('{', "as the value of metadata");
    if (json.accept('}')) return;
    std::string scratch;
    do {
        const bool size = json.string(scratch, "as a key of metadata") == "total_size";
        json.expect(':', "after a key of metadata");
        const char next = json.peek();
        const size_t before = json.offset();
        if (size && next >= '0' && next <= '9') index.total_size = json.integer(UINT64_MAX, "as total_size");
        if (json.offset() == before) json.skip_value("in metadata");
    } while (json.accept(','));
    json.expect('}', "at the end of metadata, or ','");
}

void parse_index(const std::string& what, CheckpointIndex& index) {
    JsonPull json(index.text, what);
    std::string scratch;
    bool have_map = false;
    json.expect('{', "at the start of the index");
    if (!json.accept('}')) {
        do {
            const std::string key(json.string(scratch, "as a key of the index"));
            json.expect(':', "after a key of the index");
            if (key == "weight_map") {
                if (std::exchange(have_map, true)) json.fail("weight_map appears twice");
                read_weight_map(json, index);
            } else if (key == "metadata") {
                read_index_metadata(json, index);
            } else {
                json.skip_value("in the index");
            }
        } while (json.accept(','));
        json.expect('}', "at the end of the index, or ','");
    }
    json.end();
    if (!have_map || index.shards.empty())
        FAIL(model, "{}: expected weight_map with at least one tensor", what);
}

std::string some_of(const std::vector<std::string>& names) {
    std::string out;
    for (size_t i = 0; i < names.size() && i < 5; ++i) out.append(i ? ", " : "").append(escaped(names[i]));
    if (names.size() > 5) out += fmt::format(" and {} more", names.size() - 5);
    return out;
}

/// The shard that really holds a tensor which the index places elsewhere.
std::string really_in(std::string_view tensor, const std::vector<SafetensorsFile>& shards,
                      const std::vector<std::string>& names) {
    for (size_t i = 0; i < shards.size(); ++i) {
        if (shards[i].find(tensor) != nullptr) return "it is in " + names[i];
    }
    return "no file has it";
}

/// What one shard has in common with the index.
struct ShardMatch {
    size_t tensors = 0;
    uint64_t bytes = 0;
};

/// `listed`: the number of this shard in the index, or kNotListed.
ShardMatch match_shard(const CheckpointIndex& index, const SafetensorsFile& shard, const std::string& name,
                       uint32_t listed) {
    constexpr const char* kCause = "were files of two revisions mixed?";
    ShardMatch match;
    for (const SafeTensor& t : shard.tensors()) {
        const uint32_t* expected = index.shard_of.find(t.name);
        if (expected == nullptr) {
            if (listed == kNotListed) continue;
            FAIL(model, "{}: tensor '{}': expected in the index, found nothing there; {}", name,
                 escaped(t.name), kCause);
        }
        if (*expected != listed) {
            FAIL(model, "{}: tensor '{}': the index expects it in {}, found here; {}", name, escaped(t.name),
                 index.shards[*expected], kCause);
        }
        ++match.tensors;
        match.bytes += t.bytes();
    }
    return match;
}

[[noreturn]] void fail_unmatched(const CheckpointIndex& index, const std::vector<uint32_t>& listed_as,
                                 const std::vector<SafetensorsFile>& shards,
                                 const std::vector<std::string>& names, const std::string& path,
                                 size_t matched) {
    std::vector<size_t> position(index.shards.size());  // of the index's files among ours
    for (size_t i = 0; i < shards.size(); ++i)
        if (listed_as[i] != kNotListed) position[listed_as[i]] = i;
    std::string_view first;  // of those without a tensor the smallest name: always the same message
    index.shard_of.for_each([&](std::string_view tensor, uint32_t shard) {
        if (shards[position[shard]].find(tensor) != nullptr) return;
        if (first.empty() || tensor < first) first = tensor;
    });
    FAIL(model,
         "{}: {} tensors of the index are not where it says, the first is '{}', expected in {}: {}; were "
         "files of two revisions mixed?",
         path, index.shard_of.size() - matched, escaped(first), index.shards[*index.shard_of.find(first)],
         really_in(first, shards, names));
}

}  // namespace

void read_checkpoint_index(const CheckpointFiles& files, CheckpointIndex& index,
                           std::vector<std::string>& notes) {
    const auto have = [&](const std::string& name) {
        return std::binary_search(files.weights.begin(), files.weights.end(), name);
    };
    index.text = read_text_file(files.index, kMaxIndexBytes);
    if (!guess_file_kind(index.text).empty() && !index.text.starts_with('{') && index.text[0] > ' ') {
        FAIL(model, "{}: this is {}", files.index, guess_file_kind(index.text));
    }
    parse_index(files.index, index);
    std::vector<std::string> missing;
    for (const std::string& name : index.shards) {
        if (!have(name)) missing.push_back(name);
    }
    const bool stale = missing.size() == index.shards.size() && have("model.safetensors");
    if (stale) {
        notes.push_back(
            "model.safetensors.index.json names no file that exists; model.safetensors is used alone");
        index = CheckpointIndex();
    } else if (!missing.empty()) {
        FAIL(model, "{}: {} of {} shards named by the index are missing: {}; download them", files.directory,
             missing.size(), index.shards.size(), some_of(missing));
    }
}

void check_index(const CheckpointIndex& index, const std::vector<SafetensorsFile>& shards,
                 const std::vector<std::string>& names, const std::string& path, int threads,
                 std::vector<std::string>& notes) {
    NameMap listed;
    for (size_t i = 0; i < index.shards.size(); ++i) {
        listed.emplace(index.shards[i], static_cast<uint32_t>(i));
    }
    std::vector<uint32_t> listed_as(shards.size(), kNotListed);
    for (size_t i = 0; i < shards.size(); ++i) {
        if (const uint32_t* at = listed.find(names[i]))
            listed_as[i] = *at;
        else
            notes.push_back(names[i] + ": not named by the index; its tensors are read as extras");
    }
    std::vector<ShardMatch> matches(shards.size());
    for_each_parallel(threads, shards.size(),
                      [&](size_t i) { matches[i] = match_shard(index, shards[i], names[i], listed_as[i]); });
    ShardMatch sum;
    for (const ShardMatch& m : matches) {
        sum.tensors += m.tensors;
        sum.bytes += m.bytes;
    }
    if (sum.tensors != index.shard_of.size())
        fail_unmatched(index, listed_as, shards, names, path, sum.tensors);
    if (index.total_size != 0 && index.total_size != sum.bytes) {
        notes.push_back(fmt::format("the index gives a total size of {} bytes; the tensors have {}",
                                    index.total_size, sum.bytes));
    }
}

}  // namespace quern
