#include "cuda_stand_in/kernel_name.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>

namespace quern::cuda_stand_in {
namespace {

std::string demangled(const std::string& symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> text(
        abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), std::free);
    return status == 0 ? text.get() : symbol;
}

void remove_all(std::string& text, const std::string& part) {
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at))
        text.erase(at, part.size());
}

/// The parameters begin at the first parenthesis outside of angle brackets.
void cut_parameters(std::string& text) {
    int depth = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        depth += (text[i] == '<') - (text[i] == '>');
        if (text[i] == '(' && depth == 0) return text.resize(i);
    }
}

}  // namespace

std::string kernel_name(const std::string& symbol) {
    std::string name = demangled(symbol);
    for (const char* part : {"(anonymous namespace)::", "quern::", "cuda::", "ptx::", "pack::", "linear::",
                             "moe::", "attention::", "delta::"})
        remove_all(name, part);
    cut_parameters(name);
    if (name.starts_with("void ")) name.erase(0, 5);
    for (size_t at = name.find("> >"); at != std::string::npos; at = name.find("> >")) name.erase(at + 1, 1);
    return name;
}

}  // namespace quern::cuda_stand_in
