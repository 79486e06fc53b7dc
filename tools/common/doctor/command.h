// `--doctor` as a flag of subcommands: load, examine, print, exit code.
#pragma once

#include <string>

#include "tools/common/cli_args.h"
#include "tools/common/doctor/doctor.h"
#include "tools/common/doctor/flags.h"
#include "tools/common/loading.h"

namespace quern {

/// --doctor, --json and --html, in a section of their own.
void add_doctor_flags(ArgParser& parser, DoctorFlags& flags);
/// Throws Error(usage) for --json or --html without --doctor.
void check_doctor_flags(const DoctorFlags& flags);

/// Throws Error(usage) if the weights are random, which says nothing that could be judged. `synthetic`: their name, or
/// empty.
void require_real_weights(const std::string& synthetic);

/// Loads a model for nothing but the doctor (of load.engine, context, step_tokens and kv_type count), examines it and
/// prints the report on standard output. Returns the exit code: 0, or 3 if something is wrong. Throws Error(usage) as
/// require_real_weights, Error(runtime) for a page that cannot be written, and what load_and_start throws.
int run_doctor(const LoadOptions& load, const DoctorFlags& flags);

/// Examines a model that is loaded already; the report goes to stderr.
Diagnosis examine_aloud(const LoadOptions& load, Engine& engine);

}  // namespace quern
