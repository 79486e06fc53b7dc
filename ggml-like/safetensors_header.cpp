// The header of a safetensors file: bytes to checked tensor descriptions. Touches no file.
#include <algorithm>
#include <array>
#include <cctype>
#include <limits>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"
#include "ggml-like/safetensors.h"

namespace quern {
namespace {

constexpr size_t kMaxMetadata = 65536;

struct DTypeInfo {
    const char* name;
    int bits;
};
constexpr std::array kDTypes = {
    DTypeInfo{"BOOL", 8},        DTypeInfo{"U8", 8},          DTypeInfo{"I8", 8},   DTypeInfo{"F8_E4M3", 8},
    DTypeInfo{"F8_E5M2", 8},     DTypeInfo{"I16", 16},        DTypeInfo{"U16", 16}, DTypeInfo{"F16", 16},
    DTypeInfo{"BF16", 16},       DTypeInfo{"I32", 32},        DTypeInfo{"U32", 32}, DTypeInfo{"F32", 32},
    DTypeInfo{"F64", 64},        DTypeInfo{"I64", 64},        DTypeInfo{"U64", 64}, DTypeInfo{"F8_E8M0", 8},
    DTypeInfo{"F8_E4M3FNUZ", 8}, DTypeInfo{"F8_E5M2FNUZ", 8}, DTypeInfo{"F4", 4},   DTypeInfo{"F6_E2M3", 6},
    DTypeInfo{"F6_E3M2", 6},     DTypeInfo{"C64", 64}};
static_assert(kDTypes.size() == static_cast<size_t>(SafeDType::other));

bool multiply(uint64_t a, uint64_t b, uint64_t& out) { return !__builtin_mul_overflow(a, b, &out); }

class HeaderReader {
  public:
    HeaderReader(std::string_view json, const std::string& what, SafetensorsHeader& out)
        : json_(json, what), what_(what), out_(out) {}

    void read() {
        json_.expect('{', "at the start of the header");
        if (!json_.accept('}')) {
            do read_entry();
            while (json_.accept(','));
            json_.expect('}', "at the end of the header, or ','");
        }
        json_.end();
    }

  private:
    void read_entry() {
        const std::string_view name = json_.string(scratch_, "as a tensor name");
        if (name == "__metadata__") {
            if (std::exchange(have_metadata_, true)) json_.fail("`__metadata__` appears twice");
            json_.expect(':', "after `__metadata__`");
            read_metadata();
            return;
        }
        if (name.empty()) json_.fail("a tensor has an empty name");
        if (name.find('\0') != std::string_view::npos) json_.fail("a tensor name holds a NUL character");
        SafeTensor t;
        t.name = name;
        if (name.data() == scratch_.data()) t.name = out_.unescaped.emplace_back(name);
        json_.expect(':', "after a tensor name");
        read_tensor(t);
        out_.tensors.push_back(t);
    }

    void read_metadata() {
        json_.expect('{', "as the value of `__metadata__`");
        if (json_.accept('}')) return;
        do {
            std::string key(json_.string(scratch_, "as a key of `__metadata__`"));
            json_.expect(':', "after a key of `__metadata__`");
            std::string value(json_.string(scratch_, "as a value of `__metadata__` (strings only)"));
            if (out_.metadata.size() == kMaxMetadata) json_.fail("too many entries in `__metadata__`");
            out_.metadata.emplace_back(std::move(key), std::move(value));
        } while (json_.accept(','));
        json_.expect('}', "at the end of `__metadata__`, or ','");
        std::vector<std::string_view> keys;
        for (const auto& entry : out_.metadata) keys.push_back(entry.first);
        std::sort(keys.begin(), keys.end());
        const auto twice = std::adjacent_find(keys.begin(), keys.end());
        if (twice != keys.end()) json_.fail("`__metadata__` has '" + escaped(*twice) + "' twice");
    }

    void read_tensor(SafeTensor& t) {
        enum : unsigned { kDType = 1, kShape = 2, kOffsets = 4 };
        unsigned seen = 0;
        json_.expect('{', "as a tensor's description");
        do {
            const std::string_view key = json_.string(scratch_, "as a key of a tensor's description");
            const unsigned field = key == "dtype"          ? kDType
                                   : key == "shape"        ? kShape
                                   : key == "data_offsets" ? kOffsets
                                                           : 0u;
            if (field == 0) fail(t, fmt::format("unknown key '{}'", escaped(key)));
            if (seen & field) fail(t, fmt::format("key '{}' appears twice", key));
            seen |= field;
            json_.expect(':', "after a key of a tensor's description");
            if (field == kDType)
                read_dtype(t);
            else if (field == kShape)
                read_shape(t);
            else
                read_offsets(t);
        } while (json_.accept(','));
        json_.expect('}', "at the end of a tensor's description, or ','");
        if (seen != (kDType | kShape | kOffsets))
            fail(t, "expected dtype, shape and data_offsets, found less");
        check_size(t);
    }

    /// Any name is taken: a tensor that nobody reads may have a dtype that is not known here.
    void read_dtype(SafeTensor& t) {
        const std::string_view name = json_.string(scratch_, "as a dtype");
        for (size_t i = 0; i < kDTypes.size(); ++i) {
            if (name != kDTypes[i].name) continue;
            t.dtype = static_cast<SafeDType>(i);
            return;
        }
        t.dtype = SafeDType::other;
        t.other_dtype = out_.unescaped.emplace_back(name);
    }

    void read_shape(SafeTensor& t) {
        json_.expect('[', "as a shape");
        if (json_.accept(']')) return;
        do {
            if (t.rank == kSafeMaxRank) fail(t, fmt::format("more than {} dimensions", kSafeMaxRank));
            constexpr auto kLimit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
            t.shape[t.rank++] = static_cast<int64_t>(json_.integer(kLimit, "in a shape"));
        } while (json_.accept(','));
        json_.expect(']', "at the end of a shape, or ','");
    }

    void read_offsets(SafeTensor& t) {
        constexpr uint64_t kLimit = std::numeric_limits<uint64_t>::max();
        json_.expect('[', "as data_offsets");
        t.begin = json_.integer(kLimit, "as the start of data_offsets");
        json_.expect(',', "between the two data_offsets");
        t.end = json_.integer(kLimit, "as the end of data_offsets");
        json_.expect(']', "after two data_offsets");
    }

    void check_size(const SafeTensor& t) {
        uint64_t elements = 1, bits = 0;
        for (const int64_t d : t.dims()) {
            if (!multiply(elements, static_cast<uint64_t>(d), elements)) fail_too_large(t);
        }
        const int each = t.dtype == SafeDType::other ? 8 : safe_dtype_bits(t.dtype);
        if (!multiply(elements, static_cast<uint64_t>(each), bits)) fail_too_large(t);
        if (t.begin > t.end) fail(t, fmt::format("data_offsets [{}, {}] run backwards", t.begin, t.end));
        if (t.dtype == SafeDType::other) return;
        if (bits % 8 != 0) fail(t, fmt::format("{} ends within a byte", describe(t)));
        if (t.end - t.begin != bits / 8) {
            fail(t, fmt::format("{} needs {} bytes, but data_offsets [{}, {}] hold {}", describe(t), bits / 8,
                                t.begin, t.end, t.end - t.begin));
        }
    }

    [[noreturn]] void fail_too_large(const SafeTensor& t) {
        fail(t, fmt::format("shape {} needs more than 2^61 bytes", shape_text(t.dims())));
    }

    [[noreturn]] void fail(const SafeTensor& t, const std::string& message) {
        FAIL(model, "{}: tensor '{}': {}", what_, escaped(t.name), message);
    }

    JsonPull json_;
    const std::string& what_;
    SafetensorsHeader& out_;
    std::string scratch_;
    bool have_metadata_ = false;
};

void index_names(SafetensorsHeader& h, const std::string& what) {
    h.by_name.reserve(h.tensors.size());
    for (size_t i = 0; i < h.tensors.size(); ++i) {
        const std::string_view name = h.tensors[i].name;
        if (h.by_name.emplace(name, static_cast<uint32_t>(i)).second) continue;
        FAIL(model, "{}: tensor '{}' appears twice", what, escaped(name));
    }
}

/// Data ranges in order, each starting where the last one ended, the last one ending with the file.
void check_ranges(const SafetensorsHeader& h, uint64_t data_size, const std::string& what) {
    uint64_t at = 0;
    for (const SafeTensor& t : h.tensors) {
        if (t.begin != at) {
            FAIL(model,
                 "{}: tensor '{}': expected its data at offset {}, found {}: {}; the file is damaged or was "
                 "made to mislead",
                 what, escaped(t.name), at, t.begin,
                 t.begin < at ? "it overlaps another tensor" : "there is a gap before it");
        }
        at = t.end;
    }
    if (at > data_size) {
        FAIL(model,
             "{}: the file is cut off: {} bytes are missing of {} (last tensor '{}'); download it again",
             what, at - data_size, h.data_begin + at, escaped(h.tensors.back().name));
    }
    if (at < data_size) {
        FAIL(model,
             "{}: {} bytes after the last tensor belong to nothing; expected a file of {} bytes, found {}",
             what, data_size - at, h.data_begin + at, h.data_begin + data_size);
    }
}

std::string_view text_of(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

const char* safe_dtype_name(SafeDType dtype) {
    return dtype == SafeDType::other ? "another dtype" : kDTypes[static_cast<size_t>(dtype)].name;
}

int safe_dtype_bits(SafeDType dtype) {
    return dtype == SafeDType::other ? 0 : kDTypes[static_cast<size_t>(dtype)].bits;
}

std::string_view dtype_text(const SafeTensor& t) {
    return t.dtype == SafeDType::other ? t.other_dtype : safe_dtype_name(t.dtype);
}

int64_t SafeTensor::elements() const {
    int64_t product = 1;
    for (const int64_t d : dims()) product *= d;
    return product;
}

bool SafeTensor::has_shape(std::initializer_list<int64_t> expected) const {
    const auto d = dims();
    return std::equal(d.begin(), d.end(), expected.begin(), expected.end());
}

std::string shape_text(std::span<const int64_t> shape) {
    std::string out = "[";
    for (const int64_t d : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(d);
    return out + "]";
}

std::string describe(const SafeTensor& t) { return shape_text(t.dims()) + " " + escaped(dtype_text(t)); }

std::string guess_file_kind(std::string_view s) {
    const std::string_view body = s.substr(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
    std::string lower(body.substr(0, 16));
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (s.starts_with("version https://git-lfs")) {
        return "a git-lfs pointer, not the weights: run `git lfs pull` in the checkpoint's directory";
    }
    if (lower.starts_with("<!doctype") || lower.starts_with("<html") || lower.starts_with("<?xml")) {
        return "a web page: the download got an error or login page; download it again";
    }
    if (s.starts_with("GGUF")) return "a GGUF file: quern reads safetensors checkpoints only";
    if (s.starts_with("PK\x03\x04"))
        return "a zip archive, perhaps a PyTorch .bin: convert it to safetensors";
    if (body.starts_with("{")) return "bare JSON, perhaps the index or config instead of the weights";
    if (!s.empty() && s.find_first_not_of('\0') == std::string_view::npos) {
        return "only zeros so far: a reserved file whose download did not finish";
    }
    return "";
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> start, uint64_t file_size,
                                           const std::string& what) {
    const std::string_view text = text_of(start);
    std::string kind = guess_file_kind(text.substr(0, 512));
    if (!kind.empty()) kind = "; it looks like " + kind;
    if (file_size == 0) FAIL(model, "{}: the file is empty; download it again", what);
    if (file_size < 8 || start.size() < 8) {
        FAIL(model, "{}: expected at least 8 bytes, found {}; download it again{}", what, file_size, kind);
    }
    uint64_t length = 0;
    for (size_t i = 0; i < 8; ++i) length |= static_cast<uint64_t>(start[i]) << (8 * i);
    if (length > kSafeMaxHeader) {
        FAIL(model, "{}: not a safetensors file: header length {} is above {}{}", what, length,
             kSafeMaxHeader, kind);
    }
    if (length > file_size - 8) {
        FAIL(
            model,
            "{}: the file is cut off or no safetensors file: its header should take {} bytes, {} are there{}",
            what, length, file_size - 8, kind);
    }
    if (length > start.size() - 8)
        FAIL(model, "{}: header of {} bytes, {} given", what, length, start.size() - 8);
    const std::string_view json = text.substr(8, static_cast<size_t>(length));
    if (!json.starts_with('{')) {
        FAIL(model, "{}: not a safetensors file: the header starts with '{}', expected '{{'{}", what,
             escaped(json.substr(0, 16)), kind);
    }
    SafetensorsHeader header;
    header.data_begin = 8 + length;
    const uint64_t data_size = file_size - header.data_begin;
    HeaderReader(json, what, header).read();
    std::sort(header.tensors.begin(), header.tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    index_names(header, what);
    check_ranges(header, data_size, what);
    return header;
}

}  // namespace quern
