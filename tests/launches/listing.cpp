#include "launches/listing.h"

#include <fmt/format.h>

#include <map>
#include <set>

#include "ggml-like/content_hash.h"

namespace quern::test {
namespace {

using cuda_stand_in::Kernel;

/// Rows of steps.
using Rows = std::set<int64_t>;
struct Uses {
    Rows answers, prompts;
};

/// Also with dense weights changed at load, and checkpoints.
std::vector<ModelChoice> all_formats() {
    std::vector<ModelChoice> list = all_models();
    for (const char* shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape"})
        for (const DenseFormat dense : {DenseFormat::fp8, DenseFormat::nvfp4})
            list.push_back({.shape = shape, .mix = "aeon", .dense = dense});
    for (const ModelChoice& choice : small_checkpoints()) list.push_back(choice);
    return list;
}

template <typename F>
void for_all_steps(F visit) {
    for (int device = 0; device < static_cast<int>(cuda_stand_in::devices().size()); ++device)
        for (const ModelChoice& choice : all_formats()) {
            PlacedModel model(choice, device);
            for (const BatchShape& step : all_steps(model)) visit(model, step);
        }
}

std::string text_of(const NodeLaunches& node) {
    std::string text = node.node;
    for (const Launch& launch : node.launches) text += " | " + describe(launch);
    return text + (node.refusal.empty() ? "\n" : " | " + node.refusal + "\n");
}

std::string step_line(PlacedModel& model, const BatchShape& step) {
    size_t launches = 0;
    std::string refusal;
    ContentHash hash;
    for (const NodeLaunches& node : model.each_alone(step)) {
        launches += node.launches.size();
        hash.add(text_of(node));
        if (refusal.empty() && !node.refusal.empty()) refusal = ", " + node.node + ": " + node.refusal;
    }
    return fmt::format("{} kernels, {:016x}{}", launches, hash.value(), refusal);
}

/// "1-8 16 64": neighbours among `all` as one range.
std::string ranges(const Rows& rows, const Rows& all) {
    std::string text;
    for (auto it = all.begin(); it != all.end(); ++it) {
        if (!rows.contains(*it)) continue;
        const int64_t first = *it;
        int64_t last = first;
        while (std::next(it) != all.end() && rows.contains(*std::next(it))) last = *++it;
        if (!text.empty()) text += " ";
        text += first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last);
    }
    return text;
}

std::string uses_text(const Uses& uses, const Uses& all) {
    std::string text;
    if (!uses.answers.empty()) text += " answers " + ranges(uses.answers, all.answers);
    if (!uses.prompts.empty()) text += " prompts " + ranges(uses.prompts, all.prompts);
    return text.empty() ? " -" : text;
}

}  // namespace

std::string launches_text(PlacedModel& model, const BatchShape& step) {
    std::string text;
    for (const NodeLaunches& node : model.each_alone(step)) text += text_of(node);
    return text;
}

std::string steps_text() {
    std::string text;
    for_all_steps([&](PlacedModel& model, const BatchShape& step) {
        text += fmt::format("{}, {}, {}: {}\n", model.device_name(), name_of(model.choice()), name_of(step),
                            step_line(model, step));
    });
    return text;
}

std::string kernels_text() {
    std::map<const Kernel*, std::map<int, Uses>> uses;
    std::set<const Kernel*> loading;
    Uses all;
    for_all_steps([&](PlacedModel& model, const BatchShape& step) {
        for (const Launch& launch : model.loading()) loading.insert(launch.kernel);
        const auto rows_of = [&](Uses& u) -> Rows& {
            return step.kind == StepKind::answer ? u.answers : u.prompts;
        };
        rows_of(all).insert(step.tokens);
        for (const Launch& launch : joined(model.each_alone(step)))
            rows_of(uses[launch.kernel][model.device()]).insert(step.tokens);
    });
    std::string text = "kernel", never;
    for (const cuda_stand_in::Device& device : cuda_stand_in::devices())
        text += std::string(" | ") + device.name;
    text += "\n";
    size_t missing = 0;
    for (const Kernel* kernel : cuda_stand_in::kernels()) {
        if (loading.contains(kernel)) {
            text += kernel->name + " | when weights are placed\n";
        } else if (uses.contains(kernel)) {
            text += kernel->name;
            for (int device = 0; device < static_cast<int>(cuda_stand_in::devices().size()); ++device)
                text += " |" + uses_text(uses[kernel][device], all);
            text += "\n";
        } else {
            never += kernel->name + "\n";
            ++missing;
        }
    }
    return fmt::format("{}\n{} of {} kernels are never launched:\n{}", text, missing,
                       cuda_stand_in::kernels().size(), never);
}

}  // namespace quern::test
