// quern quantize-inspect: what a checkpoint holds and whether it can be trusted.
#include "ggml-like/error.h"
#include "tools/cli_args.h"
#include "tools/commands.h"
#include "tools/inspect/report.h"
#include "tools/loading.h"

namespace quern {
namespace {

struct Options {
    std::string model, tensors;
    bool audit = false, json = false;
};

}  // namespace

int cmd_quantize_inspect(int argc, char** argv) {
    open_standard_descriptors();
    Options o;
    ArgParser parser("quantize-inspect",
                     "list a checkpoint's tensors and check that every byte is accounted for",
                     "[MODEL] [FLAGS]");
    parser.section("Flags");
    parser.positional(
        "MODEL", "directory, a file in it, or a repo id in the local Hugging Face cache; left out: the demo",
        [&](const std::string& v) { o.model = v; });
    parser.value("-m,--model", "PATH", "as MODEL", [&](const std::string& v) { o.model = v; });
    parser.value("--tensors", "REGEX", "list the tensors whose name matches; . for all",
                 [&](const std::string& v) { o.tensors = v; });
    parser.toggle("--audit",
                  "every tensor in one class, the configuration against the tensors, all scales that are floats",
                  [&](bool v) { o.audit = v; });
    parser.toggle("--json", "everything as one JSON object", [&](bool v) { o.json = v; });
    parser.footer("Reads headers only unless it is told more. Exit codes: 0 clean, 2 usage, 3 not clean.\n");
    if (!parser.parse(argc, argv)) return 0;

    const Inspection in(model_or_demo(o.model), o.audit ? ReadMode::values : ReadMode::headers);
    Output out(1);
    if (o.json) {
        out.write(inspection_json(in, o.tensors).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    } else {
        if (!o.tensors.empty()) print_tensors(in, o.tensors, out);
        if (o.audit)
            print_audit(in, out);
        else if (o.tensors.empty())
            print_summary(in, out);
    }
    return in.clean() ? 0 : static_cast<int>(ErrorKind::model);
}

}  // namespace quern
