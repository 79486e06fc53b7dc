#include "tools/quantize/write_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/parallel.h"
#include "tools/common/loading.h"
#include "tools/engine/atomic_file.h"
#include "tools/quantize/partial_directory.h"
#include "tools/quantize/quant_config.h"
#include "tools/quantize/unit_encoder.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kVersion = 1;  // of the bytes; to be raised when the same command writes others
constexpr size_t kCopyBytes = 1 << 20;

/// What decides on the bytes, in a line: the headers of the result, the scales, and the state of the source's
/// files.
std::string job_line(const Checkpoint& source, const WritePlan& plan) {
    ContentHash hash;
    hash.add(kVersion);
    hash.add(static_cast<int64_t>(plan.scales));
    for (const ShardPlan& shard : plan.shards) hash.add(shard.header);
    for (const SafetensorsFile& f : source.shards()) {
        hash.add(static_cast<int64_t>(f.file_size()));
        hash.add(fs::last_write_time(f.path()).time_since_epoch().count());
    }
    return fmt::format("quern --write {} of {} files: {:016x}\n", format_name(plan.format),
                       plan.shards.size(), hash.value());
}

void check_target(const Checkpoint& source, const std::string& directory) {
    if (directory.empty()) FAIL(usage, "--write needs a directory");
    std::error_code error;
    const fs::path from = fs::weakly_canonical(source.files().directory, error);
    if (fs::weakly_canonical(directory, error) == from)
        FAIL(usage, "--write {}: that is the source itself; name another directory", directory);
    const fs::path parent = fs::absolute(directory, error).parent_path();
    if (!fs::is_directory(parent, error))
        FAIL(usage, "--write {}: {} is no directory", directory, parent.string());
}

/// Room for what is not written yet, before anything is.
void check_room(const std::string& directory, uint64_t bytes) {
    std::error_code error;
    const fs::space_info space = fs::space(fs::absolute(directory).parent_path(), error);
    if (!error && space.available < bytes)
        FAIL(runtime, "--write {}: {:.2f} GB are needed, {:.2f} GB are free", directory,
             static_cast<double>(bytes) / 1e9, static_cast<double>(space.available) / 1e9);
}

class Writer {
  public:
    Writer(const Checkpoint& source, const WriteOptions& options)
        : source_(source), options_(options), index_(source) {
        std::optional<Recipe> recipe;
        if (!options.recipe.empty()) recipe = read_recipe(options.recipe);
        plan_ = plan_write(source, index_, recipe ? &*recipe : nullptr, options.format, options.shard_bytes);
    }

    WriteReport write() {
        const auto start = std::chrono::steady_clock::now();
        PartialDirectory target(options_.directory, job_line(source_, plan_));
        WriteReport report{.directory = options_.directory,
                           .quantized = plan_.quantized,
                           .converted = plan_.converted,
                           .inexact = plan_.inexact,
                           .source_bytes = source_.total_bytes(),
                           .bytes = plan_.bytes(),
                           .files = static_cast<int64_t>(plan_.shards.size()),
                           .notes = plan_.notes};
        if (!target.complete()) {
            const std::vector<std::string> beside = side_files(report.notes);
            report.reused = write_weights(target, bytes_of(beside));
            copy_side_files(target, beside);
            write_configs(target);
            verify(target);
            source_.check_unchanged();
            target.commit();
        }
        report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return report;
    }

  private:
    /// beside: bytes that follow.
    int64_t write_weights(PartialDirectory& target, uint64_t beside) {
        ProgressBar bar("writing");
        LoadProgress progress{.bytes_done = 0, .bytes_total = static_cast<int64_t>(plan_.bytes())};
        std::vector<std::string> finished;
        std::vector<const ShardPlan*> missing;
        uint64_t needed = beside;
        for (const ShardPlan& shard : plan_.shards) {
            if (target.has(shard.name, shard.bytes, options_.threads)) {
                finished.push_back(shard.name);
                progress.bytes_done += static_cast<int64_t>(shard.bytes);
            } else {
                missing.push_back(&shard);
                needed += shard.bytes;
            }
        }
        target.keep_only(finished);
        check_room(options_.directory, needed);
        for (const ShardPlan* shard : missing) {
            write_shard(*shard, target, bar, progress);
            target.finished(shard->name, options_.threads);
        }
        return static_cast<int64_t>(finished.size());
    }

    void write_shard(const ShardPlan& shard, const PartialDirectory& target, ProgressBar& bar,
                     LoadProgress& progress) {
        RandomAccessFile file(target.path() + shard.name, shard.bytes);
        file.write(0, shard.header.data(), shard.header.size());
        std::vector<size_t> order(shard.units.size());  // largest first: none is left for the end
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return shard.units[a].bytes() > shard.units[b].bytes(); });
        std::mutex mutex;
        for_each_parallel(options_.threads, order.size(), [&](size_t i) {
            encode_unit(source_, index_, plan_, shard.units[order[i]],
                        [&](const OutTensor& out, uint64_t at, const void* data, size_t bytes) {
                            file.write(out.begin + at, data, bytes);
                            const std::lock_guard lock(mutex);
                            progress.bytes_done += static_cast<int64_t>(bytes);
                            bar.update(progress);
                        });
        });
        file.commit();
    }

    /// Tokenizer, template, licence and whatever else lies beside the weights, drafters' folders among it.
    std::vector<std::string> side_files(std::vector<std::string>& notes) const {
        const fs::path directory = source_.files().directory;
        std::vector<std::string> files;
        for (const std::string& name : names_in(directory)) {
            const fs::path path = directory / name;
            if (is_replaced(name)) continue;
            if (fs::is_regular_file(path)) {
                files.push_back(name);
            } else if (is_drafter(name) && fs::is_directory(path)) {
                for (const std::string& part : names_in(path))
                    if (fs::is_regular_file(path / part)) files.push_back(name + "/" + part);
            } else {
                notes.push_back(
                    fmt::format("{}: not copied, {}", name, fs::is_directory(path) ? "a folder" : "no file"));
            }
        }
        return files;
    }

    static std::vector<std::string> names_in(const fs::path& directory) {
        std::vector<std::string> names;
        for (const fs::directory_entry& entry : fs::directory_iterator(directory))
            names.push_back(entry.path().filename().string());
        std::sort(names.begin(), names.end());
        return names;
    }

    /// Folders that --spec looks for.
    static bool is_drafter(const std::string& name) { return name == "mtp" || name == "dflash"; }

    uint64_t bytes_of(const std::vector<std::string>& files) const {
        uint64_t bytes = 0;
        for (const std::string& name : files)
            bytes += fs::file_size(fs::path(source_.files().directory) / name);
        return bytes;
    }

    void copy_side_files(const PartialDirectory& target, const std::vector<std::string>& files) const {
        for (const std::string& name : files) {
            const fs::path to = target.path() + name;
            fs::create_directories(to.parent_path());
            copy_file(fs::path(source_.files().directory) / name, to.string());
        }
    }

    static bool is_replaced(const std::string& name) {
        for (const char* end :
             {".safetensors", ".safetensors.index.json", ".incomplete", ".bin", ".gguf", ".pt", ".pth"})
            if (name.ends_with(end)) return true;
        return name.starts_with(".") || name == "config.json" || name == "hf_quant_config.json";
    }

    static void copy_file(const fs::path& from, const std::string& to) {
        std::ifstream in(from, std::ios::binary);
        AtomicFile out(to, 0644);
        std::vector<char> buffer(kCopyBytes);
        while (in.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || in.gcount() > 0)
            out.write(buffer.data(), static_cast<size_t>(in.gcount()));
        if (in.bad() || !in.eof()) FAIL(runtime, "cannot read {}", from.string());
        out.commit();
    }

    static void write_json(const std::string& path, const Json& json) {
        AtomicFile file(path, 0644);
        file.write(json.dump(2) + "\n");
        file.commit();
    }

    void write_configs(const PartialDirectory& target) const {
        Json config = Json::parse(source_.config_text());
        config.erase("quantization_config");
        if (config.contains("text_config") && config["text_config"].is_object())
            config["text_config"].erase("quantization_config");
        Json quantization = quantization_config(source_, index_, plan_);
        const bool quantized = !quantization.is_null();
        if (quantized) config["quantization_config"] = std::move(quantization);
        write_json(target.path() + "config.json", config);
        if (quantized && plan_.format == CheckpointFormat::modelopt)
            write_json(target.path() + "hf_quant_config.json", hf_quant_config(source_, index_, plan_));
        if (plan_.shards.size() > 1) write_index(target);
    }

    void write_index(const PartialDirectory& target) const {
        std::map<std::string, std::string> map;
        uint64_t total = 0;
        for (const ShardPlan& shard : plan_.shards)
            for (const WriteUnit& unit : shard.units)
                for (const OutTensor& out : unit.out) {
                    map.emplace(out.name, shard.name);
                    total += out.bytes();
                }
        write_json(target.path() + "model.safetensors.index.json",
                   {{"metadata", {{"total_size", total}}}, {"weight_map", nlohmann::json(map)}});
    }

    /// What was written is read as any checkpoint is: names, shapes, scales.
    static void verify(const PartialDirectory& target) {
        const Checkpoint written = Checkpoint::open(target.path());
        const ModuleIndex readable(written);
    }

    const Checkpoint& source_;
    const WriteOptions& options_;
    ModuleIndex index_;
    WritePlan plan_;
};

}  // namespace

WriteReport write_checkpoint(const Checkpoint& source, const WriteOptions& options) {
    check_target(source, options.directory);
    return Writer(source, options).write();
}

std::string describe(const WriteReport& r) {
    std::string text =
        fmt::format("{}: {:.3f} GB of weights in {} file{}, from {:.3f} GB, in {:.1f} s\n", r.directory,
                    static_cast<double>(r.bytes) / 1e9, r.files, r.files == 1 ? "" : "s",
                    static_cast<double>(r.source_bytes) / 1e9, r.seconds);
    if (r.reused > 0) text += fmt::format("  {} files were finished before and kept\n", r.reused);
    if (r.quantized > 0) text += fmt::format("  {} matrices quantized\n", r.quantized);
    if (r.converted > 0) text += fmt::format("  {} global scales converted\n", r.converted);
    if (r.inexact > 0)
        text += fmt::format(
            "  {} of them have no exact reciprocal in FP32: read values differ by 2^-24; the originals are "
            "in the header\n",
            r.inexact);
    for (const std::string& note : r.notes) text += "note: " + note + "\n";
    return text;
}

Json to_json(const WriteReport& r) {
    return {{"directory", r.directory}, {"bytes", r.bytes},     {"source_bytes", r.source_bytes},
            {"files", r.files},         {"reused", r.reused},   {"quantized", r.quantized},
            {"converted", r.converted}, {"inexact", r.inexact}, {"seconds", r.seconds},
            {"notes", r.notes}};
}

}  // namespace quern
