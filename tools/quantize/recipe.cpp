#include "tools/quantize/recipe.h"

#include <filesystem>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/checkpoint_files.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

using nlohmann::json;

constexpr const char* kStorageNames[] = {"keep", "nvfp4", "fp8", "fp8-block", "fp8-tensor"};
constexpr uint64_t kLargestFile = 1 << 20;

Recipe built_in(const std::string& name) {
    Recipe r;
    r.name = name;
    const auto set = [&](ModuleRole role, WeightStorage storage) {
        r.roles[static_cast<size_t>(role)] = storage;
    };
    for (const ModuleRole role :
         {ModuleRole::attention, ModuleRole::experts, ModuleRole::shared_expert, ModuleRole::mlp})
        set(role, WeightStorage::nvfp4);
    if (name == "xs")
        for (const ModuleRole role : {ModuleRole::delta, ModuleRole::delta_gates})
            set(role, WeightStorage::nvfp4);
    if (name == "fp8-head") set(ModuleRole::head, WeightStorage::fp8);
    return r;
}

class FileReader {
  public:
    explicit FileReader(const std::string& path) : path_(path) {}

    Recipe read() {
        recipe_.name = std::filesystem::path(path_).filename().string();
        json file;
        try {
            file = json::parse(read_text_file(path_, kLargestFile));
        } catch (const json::exception& error) {
            fail(fmt::format("no JSON: {}", error.what()));
        }
        for (const auto& [key, value] : members(file, "the recipe")) {
            if (key == "roles")
                for (const auto& [role, storage] : members(value, "roles")) read_role(role, storage);
            else if (key == "overrides")
                read_overrides(value);
            else if (key == "scales")
                recipe_.scales =
                    choose(value, "scales", {"amax", "mse"}) == 0 ? ScaleChoice::amax : ScaleChoice::mse;
            else
                fail(fmt::format("unknown key '{}'; there are roles, overrides and scales", printable(key)));
        }
        return std::move(recipe_);
    }

  private:
    [[noreturn]] void fail(const std::string& message) const { FAIL(usage, "recipe {}: {}", path_, message); }

    json::object_t members(const json& value, const std::string& what) const {
        if (!value.is_object())
            fail(fmt::format("{}: expected an object, found {}", what, value.type_name()));
        return value.get<json::object_t>();
    }

    size_t choose(const json& value, const std::string& what, const std::vector<std::string>& names) const {
        const std::string found = value.is_string() ? value.get<std::string>() : value.type_name();
        for (size_t i = 0; i < names.size(); ++i)
            if (found == names[i]) return i;
        fail(fmt::format("{}: expected one of {}, found '{}'", printable(what), fmt::join(names, ", "),
                         printable(found)));
    }

    WeightStorage storage(const json& value, const std::string& what) const {
        return static_cast<WeightStorage>(
            choose(value, what, {std::begin(kStorageNames), std::end(kStorageNames)}));
    }

    void read_role(const std::string& role, const json& value) {
        for (int r = 0; r < kModuleRoles; ++r) {
            const auto known = static_cast<ModuleRole>(r);
            if (role != role_name(known)) continue;
            recipe_.roles[static_cast<size_t>(r)] = storage(value, role);
            return;
        }
        std::vector<std::string> names;
        for (int r = 0; r < kModuleRoles; ++r) names.emplace_back(role_name(static_cast<ModuleRole>(r)));
        fail(fmt::format("no role '{}'; there are {}", printable(role), fmt::join(names, ", ")));
    }

    void read_overrides(const json& list) {
        if (!list.is_array()) fail(fmt::format("overrides: expected a list, found {}", list.type_name()));
        for (const json& entry : list) {
            const auto object = members(entry, "an override");
            if (object.size() != 2 || !object.contains("match") || !object.contains("format") ||
                !object.at("match").is_string())
                fail("an override has exactly \"match\", a regular expression, and \"format\"");
            const auto match = object.at("match").get<std::string>();
            try {
                recipe_.expressions.emplace_back(match, std::regex::ECMAScript | std::regex::optimize);
            } catch (const std::regex_error& error) {
                fail(fmt::format("'{}' is no regular expression: {}", printable(match), error.what()));
            }
            recipe_.overrides.emplace_back(match, storage(object.at("format"), "format"));
        }
    }

    const std::string& path_;
    Recipe recipe_;
};

}  // namespace

const char* storage_name(WeightStorage storage) { return kStorageNames[static_cast<int>(storage)]; }

WeightStorage Recipe::storage_of(const Module& module) const {
    for (size_t i = overrides.size(); i-- > 0;)
        if (std::regex_search(module.name, expressions[i])) return overrides[i].second;
    return roles[static_cast<size_t>(module.role)];
}

Recipe read_recipe(const std::string& name_or_file) {
    for (const char* name : {"aeon", "xs", "fp8-head"})
        if (name_or_file == name) return built_in(name);
    if (!std::filesystem::exists(name_or_file))
        FAIL(usage, "--recipe '{}': expected aeon, xs, fp8-head or a recipe file; there is no such file",
             printable(name_or_file));
    return FileReader(name_or_file).read();
}

}  // namespace quern
