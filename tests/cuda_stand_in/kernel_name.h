// Names of kernels for people.
#pragma once

#include <string>

namespace quern::cuda_stand_in {

/// Of a mangled symbol: without return type, namespaces and parameters.
std::string kernel_name(const std::string& symbol);

}  // namespace quern::cuda_stand_in
