// The doctor: examines a loaded model and this machine, and says in one page whether they can be trusted.
//
// Known answers where the model is of a published kind, sanity where it is not, and the machine. What it cannot check
// it says, with the reason. Changes nothing: requests before and after run as they would without it.
#pragma once

#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/diagnosis.h"

namespace quern {

/// Nothing else may use the engine meanwhile. Its model must have a tokenizer and real weights. Throws Error(device) if
/// the device fails.
Diagnosis examine(Engine& engine, const DoctorOptions& options);

}  // namespace quern
