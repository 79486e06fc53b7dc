#include "models/checkpoint.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/json_pull.h"
#include "models/quant_info.h"
#include "models/tensor_names.h"

namespace quern {
namespace {

constexpr uint64_t kMaxConfigBytes = 16'000'000;
constexpr uint64_t kMaxIndexBytes = 100'000'000;
constexpr size_t kMaxShards = 10'000;

/// model.safetensors.index.json. Views point into the text it was read from, or into `unescaped`.
struct Index {
    std::vector<std::string> shards;  // distinct file names
    NameMap shard_of;                 // tensor name in the file -> index into `shards`
    std::deque<std::string> unescaped;
    uint64_t total_size = 0;  // metadata.total_size; 0 = not given
};

void check_shard_name(JsonPull& json, std::string_view name) {
    if (name.find('/') != std::string_view::npos || name.find('\\') != std::string_view::npos ||
        name == ".." || name.find('\0') != std::string_view::npos || !name.ends_with(".safetensors")) {
        json.fail(
            fmt::format("'{}' is not the plain name of a .safetensors file beside the index", escaped(name)));
    }
}

void read_weight_map(JsonPull& json, Index& index) {
    json.expect('{', "as the value of weight_map");
    if (json.accept('}')) return;
    NameMap known;  // shard name -> position; views into the text or into `unescaped`
    std::string scratch;
    const auto keep = [&](std::string_view s) {
        return s.data() == scratch.data() ? std::string_view(index.unescaped.emplace_back(s)) : s;
    };
    do {
        const std::string_view tensor = keep(json.string(scratch, "as a tensor name in weight_map"));
        json.expect(':', "after a tensor name in weight_map");
        const std::string_view file = keep(json.string(scratch, "as a file name in weight_map"));
        const auto [it, fresh] = known.emplace(file, static_cast<uint32_t>(known.size()));
        if (fresh) {
            check_shard_name(json, file);
            if (known.size() > kMaxShards) json.fail("too many shards");
            index.shards.emplace_back(file);
        }
        if (!index.shard_of.emplace(tensor, it->second).second) {
            json.fail("tensor '" + escaped(tensor) + "' appears twice in weight_map");
        }
    } while (json.accept(','));
    json.expect('}', "at the end of weight_map, or ','");
}

void read_index_metadata(JsonPull& json, Index& index) {
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

Index read_index(std::string_view text, const std::string& what) {
    JsonPull json(text, what);
    Index index;
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
    return index;
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

/// The index and the shards must say the same, in both directions. Shards that the index does not name are
/// extras (a separate MTP block) whose tensors must not be in the index.
void check_index(const Index& index, const std::vector<SafetensorsFile>& shards,
                 const std::vector<std::string>& names, const std::string& path,
                 std::vector<std::string>& notes) {
    constexpr const char* kCause = "were files of two revisions mixed?";
    size_t matched = 0;
    uint64_t bytes = 0;
    std::vector<size_t> position(index.shards.size());  // of the index's files among ours
    NameMap listed_at;
    for (size_t i = 0; i < index.shards.size(); ++i) {
        listed_at.emplace(index.shards[i], static_cast<uint32_t>(i));
    }
    for (size_t i = 0; i < shards.size(); ++i) {
        const auto at = listed_at.find(names[i]);
        const bool listed = at != listed_at.end();
        if (listed) position[at->second] = i;
        if (!listed) notes.push_back(names[i] + ": not named by the index; its tensors are read as extras");
        for (const SafeTensor& t : shards[i].tensors()) {
            const auto it = index.shard_of.find(t.name);
            if (it == index.shard_of.end()) {
                if (!listed) continue;
                FAIL(model, "{}: tensor '{}': expected in the index, found nothing there; {}", names[i],
                     escaped(t.name), kCause);
            }
            const std::string& expected = index.shards[it->second];
            if (expected != names[i]) {
                FAIL(model, "{}: tensor '{}': the index expects it in {}, found here; {}", names[i],
                     escaped(t.name), expected, kCause);
            }
            ++matched;
            bytes += t.bytes();
        }
    }
    if (matched != index.shard_of.size()) {
        std::string first;  // of those without a tensor the smallest name: always the same message
        for (const auto& [tensor, shard] : index.shard_of) {
            if (shards[position[shard]].find(tensor) != nullptr) continue;
            if (first.empty() || tensor < first) first = tensor;
        }
        FAIL(model,
             "{}: {} tensors of the index are not where it says, the first is '{}', expected in {}: {}; {}",
             path, index.shard_of.size() - matched, escaped(first), index.shards[index.shard_of.at(first)],
             really_in(first, shards, names), kCause);
    }
    if (index.total_size != 0 && index.total_size != bytes) {
        notes.push_back(fmt::format("the index gives a total size of {} bytes; the tensors have {}",
                                    index.total_size, bytes));
    }
}

nlohmann::json read_json_file(const std::string& path, std::string* text_out = nullptr) {
    if (path.empty()) return nullptr;
    std::string text = read_text_file(path, kMaxConfigBytes);
    if (text.starts_with("version https://git-lfs")) {
        FAIL(model, "{}: this is {}", path, guess_file_kind(text));
    }
    nlohmann::json parsed = parse_json(text, path);
    if (!parsed.is_object()) FAIL(model, "{}: expected a JSON object, found {}", path, parsed.type_name());
    if (text_out != nullptr) *text_out = std::move(text);
    return parsed;
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& typed) {
    Checkpoint c;
    c.files_ = find_checkpoint(typed);
    c.notes_ = c.files_.notes;
    c.read_configs();
    c.open_shards();
    c.collect_tensors();
    return c;
}

void Checkpoint::read_configs() {
    config_ = read_json_file(files_.config, &config_text_);
    generation_config_ = read_json_file(files_.generation_config);
    hf_quant_config_ = read_json_file(files_.hf_quant_config);
    quant_ = read_quant_info(config_, hf_quant_config_, files_.directory);
}

void Checkpoint::open_shards() {
    std::string index_text;
    Index index;
    shard_names_ = files_.weights;
    const auto have = [&](const std::string& name) {
        return std::binary_search(files_.weights.begin(), files_.weights.end(), name);
    };
    if (!files_.index.empty()) {
        index_text = read_text_file(files_.index, kMaxIndexBytes);
        if (!guess_file_kind(index_text).empty() && !index_text.starts_with('{') && index_text[0] > ' ') {
            FAIL(model, "{}: this is {}", files_.index, guess_file_kind(index_text));
        }
        index = read_index(index_text, files_.index);
        std::vector<std::string> missing;
        for (const std::string& name : index.shards) {
            if (!have(name)) missing.push_back(name);
        }
        const bool stale = missing.size() == index.shards.size() && have("model.safetensors");
        if (stale) {
            notes_.push_back(
                "model.safetensors.index.json names no file that exists; model.safetensors is used alone");
            index = Index();
        } else if (!missing.empty()) {
            FAIL(model, "{}: {} of {} shards named by the index are missing: {}; download them",
                 files_.directory, missing.size(), index.shards.size(), some_of(missing));
        }
    }
    const std::string base = files_.directory.ends_with('/') ? files_.directory : files_.directory + "/";
    for (const std::string& name : shard_names_) shards_.push_back(SafetensorsFile::open(base + name));
    if (!index.shards.empty()) check_index(index, shards_, shard_names_, files_.index, notes_);
}

void Checkpoint::collect_tensors() {
    size_t count = 0;
    for (const SafetensorsFile& f : shards_) count += f.tensors().size();
    if (count == 0) FAIL(model, "{}: the weight files hold no tensors", files_.directory);
    tensors_.reserve(count);
    by_name_.reserve(count);
    for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
        for (const SafeTensor& t : shards_[shard].tensors()) {
            std::string official = canonical_name(t.name);
            const bool same = official == t.name;
            const std::string_view name =
                same ? t.name : std::string_view(renamed_.emplace_back(std::move(official)));
            const auto index = static_cast<uint32_t>(tensors_.size());
            tensors_.push_back({&t, shard, name});
            const auto [it, fresh] = by_name_.emplace(name, index);
            if (fresh) continue;
            FAIL(model,
                 "{} and {} are the same tensor '{}'; are two copies of the model in one directory, or was "
                 "the "
                 "model saved with two prefixes?",
                 where(it->second), where(index), escaped(name));
        }
    }
}

uint32_t Checkpoint::find(std::string_view official_name) const {
    const auto it = by_name_.find(official_name);
    return it == by_name_.end() ? kNone : it->second;
}

std::string Checkpoint::where(uint32_t index) const {
    const CheckpointTensor& t = tensors_[index];
    return fmt::format("{}: tensor '{}'", shard_names_[t.shard], escaped(t.tensor->name));
}

uint64_t Checkpoint::total_bytes() const {
    uint64_t sum = 0;
    for (const SafetensorsFile& f : shards_) sum += f.file_size();
    return sum;
}

void Checkpoint::check_unchanged() const {
    for (const SafetensorsFile& f : shards_) f.check_unchanged();
}

}  // namespace quern
