#include "models/checkpoint_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxDirectoryEntries = 100'000;

/// Names in a directory, sorted; empty when it cannot be read.
std::vector<std::string> list_directory(const fs::path& directory) {
    std::vector<std::string> names;
    std::error_code error;
    fs::directory_iterator it(directory, fs::directory_options::skip_permission_denied, error);
    for (; !error && it != fs::directory_iterator() && names.size() < kMaxDirectoryEntries;
         it.increment(error)) {
        names.push_back(it->path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

bool directory_there(const fs::path& p) {
    std::error_code error;
    return fs::is_directory(p, error);
}

/// True for anything that has that name, even a broken link: opening it will say what is wrong.
bool is_there(const fs::path& p) {
    std::error_code error;
    return fs::symlink_status(p, error).type() != fs::file_type::not_found && !error;
}

std::string env(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::vector<fs::path> hub_caches() {
    std::vector<fs::path> out;
    const auto add = [&](const std::string& base, const char* below) {
        if (base.empty()) return;
        const fs::path p = *below == '\0' ? fs::path(base) : fs::path(base) / below;
        if (std::find(out.begin(), out.end(), p) == out.end()) out.push_back(p);
    };
    add(env("HF_HUB_CACHE"), "");
    add(env("HUGGINGFACE_HUB_CACHE"), "");
    add(env("HF_HOME"), "hub");
    add(env("XDG_CACHE_HOME"), "huggingface/hub");
    add(env("HOME"), ".cache/huggingface/hub");
    return out;
}

/// Letters, digits and "._-", not starting with a dot or dash: safe as one path component.
bool plain_component(std::string_view s) {
    if (s.empty() || s.size() > 200 || s[0] == '.' || s[0] == '-') return false;
    return std::all_of(s.begin(), s.end(), [](unsigned char c) {
        return (c < 0x80 && std::isalnum(c)) || c == '.' || c == '_' || c == '-';
    });
}

struct RepoId {
    std::string user, name;
    std::vector<std::string> revision;  // "refs/pr/1" as components; empty = main
};

std::optional<RepoId> parse_repo_id(const std::string& typed) {
    const size_t at = typed.find('@');
    const std::string repo = typed.substr(0, at);
    const size_t slash = repo.find('/');
    if (slash == std::string::npos) return std::nullopt;
    RepoId id{repo.substr(0, slash), repo.substr(slash + 1), {}};
    if (!plain_component(id.user) || !plain_component(id.name)) return std::nullopt;
    if (at == std::string::npos) return id;
    std::string_view rest = std::string_view(typed).substr(at + 1);
    for (;;) {
        const size_t next = rest.find('/');
        id.revision.emplace_back(rest.substr(0, next));
        if (!plain_component(id.revision.back()) || id.revision.size() > 8) return std::nullopt;
        if (next == std::string_view::npos) return id;
        rest.remove_prefix(next + 1);
    }
}

std::string read_ref(const fs::path& path) {
    if (!is_there(path) || directory_there(path)) return "";
    std::string text = read_text_file(path.string(), 256);
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
    if (!plain_component(text))
        FAIL(model, "{}: expected a revision hash, found '{}'", path.string(), escaped(text));
    return text;
}

/// The snapshot directory of a repository in one cache; empty when the cache does not have it.
fs::path find_snapshot(const fs::path& repo, const RepoId& id, std::vector<std::string>& tried) {
    const fs::path snapshots = repo / "snapshots";
    tried.push_back(snapshots.string());
    if (!directory_there(snapshots)) return {};
    const std::vector<std::string> have = list_directory(snapshots);
    fs::path ref = repo / "refs";
    if (id.revision.empty()) ref /= "main";
    for (const std::string& part : id.revision) ref /= part;
    const std::string hash = read_ref(ref);
    if (!hash.empty()) {
        if (directory_there(snapshots / hash)) return snapshots / hash;
        tried.back() += fmt::format(" (revision {} is named but was not downloaded)", hash);
        return {};
    }
    if (id.revision.empty()) {
        if (have.size() == 1) return snapshots / have[0];
        if (have.size() > 1)
            tried.back() += fmt::format(" ({} revisions and no `main`: add @REVISION)", have.size());
        return {};
    }
    std::vector<std::string> matches;  // a commit hash or the start of one
    for (const std::string& h : have) {
        if (id.revision.size() == 1 && h.starts_with(id.revision[0])) matches.push_back(h);
    }
    if (matches.size() == 1) return snapshots / matches[0];
    tried.back() += fmt::format(" ({} of {} revisions match)", matches.size(), have.size());
    return {};
}

fs::path find_in_cache(const std::string& typed) {
    const std::optional<RepoId> id = parse_repo_id(typed);
    std::vector<std::string> tried;
    if (id) {
        for (const fs::path& cache : hub_caches()) {
            const fs::path found =
                find_snapshot(cache / ("models--" + id->user + "--" + id->name), *id, tried);
            if (!found.empty()) return found;
        }
    }
    std::string message =
        fmt::format("no checkpoint found for '{}'. Tried:\n  {} (not there, or not readable)",
                    escaped(typed, 500), escaped(typed, 500));
    for (const std::string& t : tried) message += "\n  " + t;
    if (id) {
        message += fmt::format("\nDownload it first, for example: hf download {}/{}", id->user, id->name);
    } else {
        message += "\nGive a checkpoint directory, a file in one, or a repository id such as user/name";
    }
    throw Error(ErrorKind::model, message, __FILE__, __LINE__);
}

void note_unfinished_downloads(const fs::path& directory, std::vector<std::string>& notes) {
    // `hf download` keeps unfinished files in blobs/ of the cache, or below .cache/ of a local directory.
    for (const fs::path& where : {directory, directory / ".cache/huggingface/download",
                                  directory.parent_path().parent_path() / "blobs"}) {
        const bool blobs = where.filename() == "blobs";
        if (blobs && directory.parent_path().filename() != "snapshots") continue;
        size_t count = 0;
        for (const std::string& name : list_directory(where)) count += name.ends_with(".incomplete");
        if (count > 0) {
            notes.push_back(fmt::format("{} unfinished download{} (*.incomplete) in {}: finish or delete {}",
                                        count, count == 1 ? "" : "s", where.string(),
                                        count == 1 ? "it" : "them"));
        }
    }
}

/// "model-00001-of-00009.safetensors" gives 9, other names 0.
int shard_total(const std::string& name) {
    const size_t of = name.rfind("-of-");
    if (of == std::string::npos || !name.ends_with(".safetensors")) return 0;
    int total = 0;
    for (size_t i = of + 4; i + 12 < name.size() && i < of + 9; ++i) {
        if (name[i] < '0' || name[i] > '9') return 0;
        total = total * 10 + (name[i] - '0');
    }
    return total;
}

void collect_weights(CheckpointFiles& files, const std::vector<std::string>& names) {
    int total = 0;
    bool mixed = false;
    for (const std::string& name : names) {
        if (!name.ends_with(".safetensors") || name[0] == '.') continue;  // "._x": a Mac's copy notes
        files.weights.push_back(name);
        const int of = shard_total(name);
        mixed = mixed || (of != 0 && total != 0 && of != total);
        if (of != 0) total = of;
    }
    if (mixed) {
        files.notes.push_back(
            fmt::format("{}: shards of two different splits ('-of-') lie side by side: were two "
                        "revisions mixed?",
                        files.directory));
    }
    if (files.weights.empty()) {
        const auto has = [&](const char* end) {
            return std::any_of(names.begin(), names.end(),
                               [&](const std::string& n) { return n.ends_with(end); });
        };
        FAIL(model, "{}: no *.safetensors file in this directory{}", files.directory,
             has(".gguf")
                 ? "; there is a GGUF file, which quern does not read: get the safetensors checkpoint"
             : has(".bin")        ? "; there are PyTorch .bin files: convert them to safetensors"
             : has(".incomplete") ? "; the download is not finished"
                                  : "; is it the checkpoint's directory, and is the download complete?");
    }
    const bool single = std::binary_search(files.weights.begin(), files.weights.end(), "model.safetensors");
    if (files.index.empty() && total > 1 && !single) {
        FAIL(model,
             "{}: the weights are in {} shards, but model.safetensors.index.json is missing; download it",
             files.directory, total);
    }
}

}  // namespace

std::string read_text_file(const std::string& path, uint64_t limit) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) FAIL(model, "{}: cannot open: {}", path, strerror(errno));
    struct stat info {};
    std::string text;
    const char* problem = nullptr;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        problem = "expected a file, found a directory, FIFO or device";
    else if (static_cast<uint64_t>(info.st_size) > limit)
        problem = "the file is far larger than such a file can be";
    if (problem == nullptr) {
        text.resize(static_cast<size_t>(info.st_size));
        size_t at = 0;
        while (at < text.size()) {
            const ssize_t n = read(fd, text.data() + at, text.size() - at);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) problem = "cannot read the file";
            if (n <= 0) break;
            at += static_cast<size_t>(n);
        }
        text.resize(at);
    }
    ::close(fd);
    if (problem != nullptr) FAIL(model, "{}: {}", path, problem);
    return text;
}

std::vector<std::string> mtp_folder_weights(const CheckpointFiles& files) {
    std::vector<std::string> weights;
    for (const std::string& name : list_directory(fs::path(files.directory) / "mtp"))
        if (name.ends_with(".safetensors") && name[0] != '.') weights.push_back("mtp/" + name);
    return weights;
}

CheckpointFiles find_checkpoint(const std::string& typed) {
    if (typed.empty()) FAIL(model, "the model path is empty; give a checkpoint directory or a repository id");
    if (typed.find('\0') != std::string::npos) FAIL(model, "the model path holds a NUL character");
    fs::path path(typed);
    std::string only;  // a weights file that the user named
    if (!is_there(path)) {
        path = find_in_cache(typed);
    } else if (!directory_there(path)) {
        const std::string name = path.filename().string();
        if (name.ends_with(".gguf")) {
            FAIL(model, "{}: quern reads safetensors checkpoints, not GGUF; get the original checkpoint",
                 typed);
        }
        if (!name.ends_with(".safetensors") && !name.ends_with(".json")) {
            FAIL(model, "{}: expected a directory, config.json, an index or a .safetensors file", typed);
        }
        if (name.ends_with(".safetensors")) only = name;
        path = path.has_parent_path() ? path.parent_path() : fs::path(".");
    }
    CheckpointFiles files;
    files.directory = path.string();
    const std::vector<std::string> names = list_directory(path);
    const auto file = [&](const char* name) {
        return std::binary_search(names.begin(), names.end(), name) ? (path / name).string() : std::string();
    };
    files.config = file("config.json");
    files.generation_config = file("generation_config.json");
    files.hf_quant_config = file("hf_quant_config.json");
    files.index = file("model.safetensors.index.json");
    std::error_code error;
    note_unfinished_downloads(fs::absolute(path, error).lexically_normal(), files.notes);
    if (files.config.empty()) {
        FAIL(model,
             "{}: config.json is missing; is it the checkpoint's directory, and is the download complete?",
             files.directory);
    }
    collect_weights(files, names);
    if (!only.empty() && files.index.empty() && files.weights.size() > 1) {
        files.weights = {only};
        files.notes.push_back(
            fmt::format("{}: only this file was asked for; others in the directory are left aside", only));
    }
    return files;
}

}  // namespace quern
