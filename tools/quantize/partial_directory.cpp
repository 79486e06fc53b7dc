#include "tools/quantize/partial_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/parallel.h"
#include "models/checkpoint_files.h"
#include "tools/engine/atomic_file.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kChecksumChunk = 16 << 20;
constexpr uint64_t kLargestNote = 4096;

[[noreturn]] void fail_at(const char* what, const std::string& path) {
    FAIL(runtime, "cannot {} {}: {}", what, path, std::strerror(errno));
}

void make_directory(const std::string& path) {
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) fail_at("make", path);
}

/// A name is durable when its directory is. File systems that cannot do this need it not.
void sync_directory(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    ::fsync(fd);
    ::close(fd);
}

bool exists(const std::string& path) {
    std::error_code error;
    return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

std::string read_note(const std::string& path) {
    return exists(path) ? read_text_file(path, kLargestNote) : "";
}

void write_note(const std::string& path, const std::string& text) {
    AtomicFile file(path, 0644);
    file.write(text);
    file.commit();
}

std::string checksum_text(uint64_t bytes, uint64_t checksum) {
    return fmt::format("{} {:016x}\n", bytes, checksum);
}

}  // namespace

PartialDirectory::PartialDirectory(const std::string& directory, const std::string& job)
    : directory_(directory) {
    while (directory_.size() > 1 && directory_.ends_with('/')) directory_.pop_back();
    state_ = directory_ + ".partial/";
    path_ = state_ + "files/";
    if (exists(directory_)) {
        // An end that was interrupted after the last step that matters.
        complete_ =
            exists(state_) && !exists(path_) && (fs::is_empty(state_) || read_note(state_ + "job") == job);
        if (!complete_)
            FAIL(usage, "--write {}: it exists already; remove it or name another directory", directory_);
        remove_state();
        return;
    }
    if (exists(state_) && !fs::is_empty(state_) && !exists(state_ + "lock"))
        FAIL(usage, "--write {}: {} exists and was not left by an interrupted --write; remove it", directory_,
             state_);
    make_directory(state_);
    take_lock();
    const std::string before = read_note(state_ + "job");
    if (before.empty()) {
        write_note(state_ + "job", job);
    } else if (before != job) {
        FAIL(usage,
             "--write {}: {} holds the unfinished result of another source, recipe, format or version of "
             "quern; "
             "remove it, or repeat that command",
             directory_, state_);
    }
    make_directory(path_);
}

void PartialDirectory::take_lock() {
    lock_.fd = ::open((state_ + "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_.fd < 0) fail_at("write", state_ + "lock");
    if (::flock(lock_.fd, LOCK_EX | LOCK_NB) != 0)
        FAIL(usage, "--write {}: another process is writing it", directory_);
}

/// What says that it is ours goes last.
void PartialDirectory::remove_state() const {
    for (const fs::directory_entry& entry : fs::directory_iterator(state_))
        if (entry.path().filename() != "job") fs::remove_all(entry.path());
    fs::remove(state_ + "job");
    fs::remove(directory_ + ".partial");
}

PartialDirectory::Lock::~Lock() {
    if (fd >= 0) ::close(fd);
}

bool PartialDirectory::has(const std::string& name, uint64_t bytes, int threads) const {
    std::error_code error;
    if (fs::file_size(path_ + name, error) != bytes || error) return false;
    const std::string note = read_note(state_ + name + ".sum");
    return !note.empty() && note == checksum_text(bytes, file_checksum(path_ + name, threads));
}

void PartialDirectory::keep_only(const std::vector<std::string>& names) const {
    for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
        const std::string name = entry.path().filename().string();
        if (std::find(names.begin(), names.end(), name) == names.end()) fs::remove_all(entry.path());
    }
}

void PartialDirectory::finished(const std::string& name, int threads) const {
    write_note(state_ + name + ".sum",
               checksum_text(fs::file_size(path_ + name), file_checksum(path_ + name, threads)));
}

void PartialDirectory::commit() {
    sync_directory(path_);
    if (exists(directory_))
        FAIL(usage, "--write {}: it appeared while it was being written; the result is in {}", directory_,
             path_);
    if (::rename((state_ + "files").c_str(), directory_.c_str()) != 0) fail_at("rename to", directory_);
    const fs::path parent = fs::path(directory_).parent_path();
    sync_directory(parent.empty() ? "." : parent.string());
    remove_state();
}

RandomAccessFile::RandomAccessFile(const std::string& path, uint64_t bytes)
    : path_(path), temporary_(path + ".tmp") {
    fd_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) fail();
    // Better now than after an hour; file systems that cannot reserve say so.
    if (::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
        fail();
}

RandomAccessFile::~RandomAccessFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void RandomAccessFile::fail() const {
    const int cause = errno;
    FAIL(runtime, "cannot write {}: {}{}", path_, std::strerror(cause),
         cause == ENOSPC ? "; make room and repeat the command: what is finished is kept" : "");
}

void RandomAccessFile::write(uint64_t at, const void* data, size_t bytes) const {
    const auto* p = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t n = ::pwrite(fd_, p, bytes, static_cast<off_t>(at));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail();
        p += n;
        at += static_cast<uint64_t>(n);
        bytes -= static_cast<size_t>(n);
    }
}

void RandomAccessFile::commit() {
    if (::fsync(fd_) != 0) fail();
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
    temporary_.clear();
    sync_directory(fs::path(path_).parent_path().string());
}

uint64_t file_checksum(const std::string& path, int threads) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    if (fd < 0 || ::fstat(fd, &info) != 0) {
        if (fd >= 0) ::close(fd);
        fail_at("read", path);
    }
    const auto size = static_cast<uint64_t>(info.st_size);
    std::vector<uint64_t> chunks((size + kChecksumChunk - 1) / kChecksumChunk);
    try {
        for_each_parallel(threads, chunks.size(), [&](size_t i) {
            std::vector<char> buffer(std::min(kChecksumChunk, size - i * kChecksumChunk));
            for (size_t got = 0; got < buffer.size();) {
                const ssize_t n = ::pread(fd, buffer.data() + got, buffer.size() - got,
                                          static_cast<off_t>(i * kChecksumChunk + got));
                if (n < 0 && errno == EINTR) continue;
                if (n <= 0) fail_at("read", path);
                got += static_cast<size_t>(n);
            }
            ContentHash hash;
            hash.add(buffer.data(), buffer.size());
            chunks[i] = hash.value();
        });
    } catch (...) {
        ::close(fd);
        throw;
    }
    ::close(fd);
    ContentHash all;
    all.add(static_cast<int64_t>(size));
    for (const uint64_t chunk : chunks) all.add(static_cast<int64_t>(chunk));
    return all.value();
}

}  // namespace quern
