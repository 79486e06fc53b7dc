// Layout: a header, then entries for each architecture, each a header and an ELF file ("cubin") with these sections:
//   .nv.shared.KERNEL  its size: static shared memory; from sm_90 on with the 1 KB that the system keeps
//   .nv.info.KERNEL    attributes: a byte of form, a byte that says what, two bytes of value or of its size, the value
#include "cuda_stand_in/compiled_code.h"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace quern::cuda_stand_in {
namespace {

using Bytes = std::span<const std::byte>;

struct Wrapper {
    uint32_t magic, version;
    const std::byte* data;
    const void* unused;
};
constexpr uint32_t kWrapperMagic = 0x466243b1;

struct Header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;  // of all entries
};
constexpr uint32_t kMagic = 0xba55ed50;

struct Entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t unused[3];
    uint32_t architecture;  // 90
};
constexpr uint16_t kElf = 2;

constexpr uint8_t kSizedForm = 4, kMaxThreads = 0x05, kClusterBlocks = 0x3d;
constexpr int kSystemShared = 1024;

/// A T at this place; zeros beyond the end.
template <typename T>
T at(Bytes bytes, size_t place) {
    T value{};
    if (place <= bytes.size() && sizeof(T) <= bytes.size() - place)
        std::memcpy(&value, bytes.data() + place, sizeof(T));
    return value;
}

Bytes part(Bytes bytes, size_t begin, size_t count) {
    if (begin > bytes.size() || count > bytes.size() - begin) return {};
    return bytes.subspan(begin, count);
}

void read_info(Bytes info, CompiledKernel& kernel) {
    for (size_t i = 0; i + 4 <= info.size();) {
        const auto form = at<uint8_t>(info, i), what = at<uint8_t>(info, i + 1);
        const size_t size = form == kSizedForm ? at<uint16_t>(info, i + 2) : 0;
        i += 4;
        const auto value = [&](size_t n) { return at<int32_t>(info, i + 4 * n); };
        if (form == kSizedForm && what == kMaxThreads) kernel.most_threads = value(0) * value(1) * value(2);
        if (form == kSizedForm && what == kClusterBlocks)
            for (size_t n = 0; n < 3; ++n) kernel.cluster[n] = value(n);
        i += size;
    }
}

std::map<std::string, CompiledKernel> read_elf(Bytes file, int architecture) {
    const auto header = at<Elf64_Ehdr>(file, 0);
    const auto section = [&](size_t n) {
        return at<Elf64_Shdr>(file, header.e_shoff + n * header.e_shentsize);
    };
    const Elf64_Shdr strings = section(header.e_shstrndx);
    const Bytes names = part(file, strings.sh_offset, strings.sh_size);
    std::map<std::string, CompiledKernel> kernels;
    for (size_t n = 0; n < header.e_shnum; ++n) {
        const Elf64_Shdr s = section(n);
        if (s.sh_name >= names.size()) continue;
        const std::string_view name = reinterpret_cast<const char*>(names.data()) + s.sh_name;
        constexpr std::string_view kInfo = ".nv.info.", kShared = ".nv.shared.";
        if (name.starts_with(kInfo))
            read_info(part(file, s.sh_offset, s.sh_size), kernels[std::string(name.substr(kInfo.size()))]);
        if (name.starts_with(kShared))
            kernels[std::string(name.substr(kShared.size()))].static_shared =
                static_cast<int>(s.sh_size) - (architecture >= 90 ? kSystemShared : 0);
    }
    return kernels;
}

}  // namespace

CompiledCode read_compiled_code(const void* wrapper) {
    CompiledCode code;
    const auto& outer = *static_cast<const Wrapper*>(wrapper);
    if (outer.magic != kWrapperMagic) return code;
    const auto header = at<Header>({outer.data, sizeof(Header)}, 0);
    if (header.magic != kMagic) return code;
    const Bytes all{outer.data, header.header_bytes + header.bytes};
    for (size_t place = header.header_bytes; place < all.size();) {
        const auto entry = at<Entry>(all, place);
        if (entry.header_bytes < sizeof(Entry)) break;
        const Bytes file = part(all, place + entry.header_bytes, entry.bytes);
        const auto architecture = static_cast<int>(entry.architecture);
        if (entry.kind == kElf && at<uint32_t>(file, 0) == 0x464c457f)
            code[architecture] = read_elf(file, architecture);
        place += entry.header_bytes + entry.bytes;
    }
    return code;
}

}  // namespace quern::cuda_stand_in
