// How fast a device copies within its own memory.
#pragma once

#include <functional>

namespace quern {

class Backend;

/// Bytes a second, each read and written once: the fastest of a few runs over at most a quarter of the free memory, 1 GB
/// at most. `meanwhile`, if given, is called once while a run is under way. Throws Error(memory).
double measure_copy_speed(Backend& backend, const std::function<void()>& meanwhile = {});

}  // namespace quern
