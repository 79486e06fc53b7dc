#include "tools/common/doctor/command.h"

#include <algorithm>
#include <fstream>
#include <thread>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "tools/common/cli_values.h"
#include "tools/common/output.h"

namespace quern {
namespace {

/// Enough for a needle at 32K tokens and its question. More would take the memory that the checks need.
constexpr int64_t kContext = 33 * 1024;
constexpr int64_t kSequences = 16;  // an answer and 15 others

void write_page(const std::string& path, const Diagnosis& d) {
    std::ofstream out(path, std::ios::binary);
    out << to_html(d);
    out.close();
    if (!out) FAIL(runtime, "--html {}: cannot write it", printable(path, 400));
}

/// The same model on the CPU, to compare a GPU with; nothing if `loaded` runs there itself, or if its weights are not
/// those of the files.
std::function<SecondModel()> opener_on_cpu(const LoadOptions& load, const Backend& loaded) {
    if (!loaded.captures() || load.dense != DenseFormat::as_stored) return {};
    // Two are left to the checks that run beside it.
    const int all = static_cast<int>(std::thread::hardware_concurrency());
    return [path = load.model, threads = load.threads > 0 ? load.threads : std::max(1, all - 2)] {
        SecondModel second{.backend = make_cpu_backend(threads), .model = {}};
        second.model = load_model(model_or_demo(path), *second.backend,
                                  {.tokenizer = false, .threads = second.backend->threads()});
        return second;
    };
}

}  // namespace

void add_doctor_flags(ArgParser& p, DoctorFlags& flags) {
    p.section("A verdict on the model");
    p.toggle(
        "--doctor",
        "instead: examine the loaded model and this machine in some seconds: known answers, sanity, the same "
        "bits twice; exit code 3 if something is wrong",
        [&flags](bool v) { flags.wanted = v; });
    p.toggle("--json", "with --doctor: as JSON", [&flags](bool v) { flags.json = v; });
    p.value("--html", "FILE", "with --doctor: also as a page with a picture of the experts' load",
            [&flags](const std::string& v) { flags.html = v; });
}

void check_doctor_flags(const DoctorFlags& flags) {
    if (flags.wanted || (!flags.json && flags.html.empty())) return;
    FAIL(usage, "{} is a form of --doctor's report, which was not asked for",
         flags.json ? "--json" : "--html");
}

void require_real_weights(const std::string& synthetic) {
    if (!synthetic.empty())
        FAIL(usage,
             "--doctor: --synthetic {} has random weights, which say nothing that could be judged; name a "
             "checkpoint",
             printable(synthetic));
}

int run_doctor(const LoadOptions& load, const DoctorFlags& flags) {
    require_real_weights(load.synthetic);
    LoadOptions options = load;
    options.engine = {.context = load.engine.context,
                      .sequences = kSequences,
                      .step_tokens = load.engine.step_tokens,
                      .kv_type = load.engine.kv_type,
                      .kv_type_v = load.engine.kv_type_v};
    options.context_limit = kContext;
    const LoadedModel loaded = load_and_start(options);
    const Diagnosis d = examine(*loaded.engine, {.open_on_cpu = opener_on_cpu(load, *loaded.backend)});
    if (!flags.html.empty()) write_page(flags.html, d);
    Output(1).write(flags.json ? to_json(d).dump(2) + "\n" : describe(d));
    return d.exit_code();
}

Diagnosis examine_aloud(const LoadOptions& load, Engine& engine) {
    Diagnosis d = examine(engine, {.open_on_cpu = opener_on_cpu(load, engine.backend())});
    note(describe(d));
    return d;
}

}  // namespace quern
