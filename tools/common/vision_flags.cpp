#include "tools/common/vision_flags.h"

#include <string>

#include "ggml-like/check.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"

namespace quern {

void add_vision_flags(ArgParser& parser, VisionOptions& options) {
    parser.value(
        "--vision", "on|fp8|off",
        "on: the vision tower as it is stored (default); fp8: in half of the memory; off: as --no-vision",
        [&options](const std::string& v) {
            if (v != "on" && v != "fp8" && v != "off")
                FAIL(usage, "--vision: expected on, fp8 or off, found '{}'", printable(v));
            options.on = v != "off";
            options.format = v == "fp8" ? DenseFormat::fp8 : DenseFormat::as_stored;
        });
    parser.toggle("--no-vision,--no-mmproj", "read no images: the vision tower stays out of memory",
                  [&options](bool v) { options.on = !v; });
    parser.value("--mmproj", "auto|off", "off: as --no-vision", [&options](const std::string& v) {
        if (v != "auto" && v != "off")
            FAIL(usage,
                 "--mmproj: expected auto or off, found '{}'; the vision tower is in the checkpoint itself",
                 printable(v));
        options.on = v == "auto";
    });
    parser.value("--image-min-tokens", "N",
                 "smaller images are enlarged to so many tokens; default: as the checkpoint says",
                 [&options](const std::string& v) {
                     options.min_tokens = parse_integer(v, "--image-min-tokens", 8, 1 << 20);
                 });
    parser.value(
        "--image-max-tokens", "N",
        "larger images are shrunk to so many tokens; default: as the checkpoint says, on the CPU 1024",
        [&options](const std::string& v) {
            options.max_tokens = parse_integer(v, "--image-max-tokens", 8, 1 << 20);
        });
}

}  // namespace quern
