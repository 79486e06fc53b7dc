#include "tools/engine/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr size_t kBuffer = 1 << 18;

bool is_special(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);
}

// A link to a file stays a link: what it points to is replaced.
std::string resolve(const std::string& path) {
    char* real = ::realpath(path.c_str(), nullptr);
    if (real == nullptr) return path;
    std::string out = real;
    std::free(real);
    return out;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path, unsigned mode) : path_(path) {
    if (is_special(path)) {
        fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    } else {
        path_ = resolve(path);
        temporary_ = fmt::format("{}.{}.tmp", path_, ::getpid());
        fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    }
    if (fd_ < 0) {
        temporary_.clear();
        fail("cannot write");
    }
}

AtomicFile::~AtomicFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what) const {
    FAIL(runtime, "{} {}: {}", what, path_, std::strerror(errno));
}

void AtomicFile::write(std::string_view bytes) {
    buffer_.append(bytes);
    if (buffer_.size() >= kBuffer) flush();
}

void AtomicFile::flush() {
    std::string_view rest = buffer_;
    while (!rest.empty()) {
        const ssize_t n = ::write(fd_, rest.data(), rest.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail("cannot write");
        rest.remove_prefix(static_cast<size_t>(n));
    }
    buffer_.clear();
}

void AtomicFile::commit() {
    flush();
    if (temporary_.empty()) return;
    if (::fsync(fd_) != 0) fail("cannot write");
    // Some file systems report a full disk only here.
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0) fail("cannot write");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot replace");
    temporary_.clear();
    // The name is durable when its directory is. File systems that cannot do this need it not.
    const size_t slash = path_.find_last_of('/');
    const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    ::fsync(fd);
    ::close(fd);
}

}  // namespace quern
