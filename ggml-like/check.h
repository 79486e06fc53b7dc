// The macros that throw Error. For .cpp files: headers that only name Error include error.h.
#pragma once

#include <fmt/format.h>

#include "ggml-like/error.h"

/// Throws quern::Error of the given kind with a formatted message.
#define FAIL(kind, ...) \
    throw ::quern::Error(::quern::ErrorKind::kind, ::fmt::format(__VA_ARGS__), __FILE__, __LINE__)

/// Contract check in builders and ops: CHECK(cond, "[op] text {}", value).
#define CHECK(cond, ...)                         \
    do {                                         \
        if (!(cond)) FAIL(runtime, __VA_ARGS__); \
    } while (0)
