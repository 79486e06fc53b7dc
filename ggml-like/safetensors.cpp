#include "ggml-like/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"

namespace quern {
namespace {

constexpr size_t kSniffBytes = 512;

/// Reads exactly `count` bytes or fails: a file that got shorter since fstat is reported, not guessed at.
void read_exactly(int fd, uint64_t offset, std::byte* out, uint64_t count, const std::string& path) {
    while (count > 0) {
        const ssize_t n = pread(fd, out, static_cast<size_t>(count), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) FAIL(model, "{}: cannot read: {}", path, strerror(errno));
        if (n == 0)
            FAIL(model, "{}: the file became shorter while it was read; is a download still running?", path);
        out += n;
        offset += static_cast<uint64_t>(n);
        count -= static_cast<uint64_t>(n);
    }
}

int open_regular(const std::string& path, struct stat& info) {
    // O_NONBLOCK: opening a FIFO must fail below instead of waiting for a writer.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        const int error = errno;
        struct stat link {};
        const bool dangling = error == ENOENT && lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode);
        FAIL(model, "{}: cannot open: {}{}", path, strerror(error),
             dangling         ? "; it is a link whose target is missing: the download is not complete"
             : error == ELOOP ? "; it is a link that leads back to itself"
                              : "");
    }
    const char* kind = nullptr;
    if (fstat(fd, &info) != 0)
        kind = "something that cannot be examined";
    else if (S_ISDIR(info.st_mode))
        kind = "a directory";
    else if (S_ISFIFO(info.st_mode))
        kind = "a FIFO";
    else if (!S_ISREG(info.st_mode))
        kind = "a device or socket";
    if (kind != nullptr) {
        ::close(fd);
        FAIL(model, "{}: expected a safetensors file, found {}", path, kind);
    }
    return fd;
}

int64_t mtime_of(const struct stat& info) {
    return static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::string& path) {
    SafetensorsFile f;
    struct stat info {};
    f.path_ = path;
    f.fd_ = open_regular(path, info);
    f.size_ = static_cast<uint64_t>(info.st_size);
    f.mtime_ns_ = mtime_of(info);
    // The first bytes decide how much is read further: a header that lies about its length costs nothing.
    std::byte first[kSniffBytes];
    const uint64_t sniffed = f.size_ < kSniffBytes ? f.size_ : kSniffBytes;
    read_exactly(f.fd_, 0, first, sniffed, path);
    uint64_t length = 0;
    for (size_t i = 0; i < 8 && i < sniffed; ++i) length |= static_cast<uint64_t>(first[i]) << (8 * i);
    const bool plausible = sniffed >= 8 && length <= kSafeMaxHeader && length <= f.size_ - 8;
    const uint64_t wanted = plausible ? length + 8 : sniffed;
    f.header_ = std::make_unique<std::byte[]>(wanted);
    read_exactly(f.fd_, 0, f.header_.get(), wanted, path);
    f.parsed_ = parse_safetensors_header({f.header_.get(), static_cast<size_t>(wanted)}, f.size_, path);

    void* map = mmap(nullptr, f.size_, PROT_READ, MAP_PRIVATE, f.fd_, 0);
    if (map == MAP_FAILED) {
        FAIL(model, "{}: cannot map {} bytes: {}; is the address space limited ('ulimit -v')?", path, f.size_,
             strerror(errno));
    }
    f.map_ = static_cast<const std::byte*>(map);
    for (SafeTensor& t : f.parsed_.tensors) t.data = f.map_ + f.parsed_.data_begin + t.begin;
    return f;
}

const SafeTensor* SafetensorsFile::find(std::string_view name) const {
    const uint32_t* at = parsed_.by_name.find(name);
    return at == nullptr ? nullptr : &parsed_.tensors[*at];
}

void SafetensorsFile::check_unchanged() const {
    struct stat info {};
    if (fstat(fd_, &info) != 0) FAIL(model, "{}: cannot examine: {}", path_, strerror(errno));
    const auto now = static_cast<uint64_t>(info.st_size);
    if (now == size_ && mtime_of(info) == mtime_ns_) return;
    FAIL(model, "{}: the file was changed while it was in use ({} bytes when opened, {} now); load it again",
         path_, size_, now);
}

void SafetensorsFile::close_all() noexcept {
    if (map_ != nullptr) munmap(const_cast<std::byte*>(map_), size_);
    if (fd_ >= 0) ::close(fd_);
    map_ = nullptr;
    fd_ = -1;
}

SafetensorsFile::~SafetensorsFile() { close_all(); }

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
    if (this == &other) return *this;
    close_all();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
    mtime_ns_ = other.mtime_ns_;
    header_ = std::move(other.header_);
    parsed_ = std::move(other.parsed_);
    map_ = std::exchange(other.map_, nullptr);
    return *this;
}

}  // namespace quern
