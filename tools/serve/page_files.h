// The files of the page at /: tools/serve/page and the libraries that it imports, embedded when the program is built.
#pragma once

#include <span>
#include <string_view>

namespace quern {

struct PageFile {
    std::string_view name;  // under /page/VERSION/
    std::string_view type;
    bool gzip;  // the bytes are compressed
    std::string_view bytes;
};

std::span<const PageFile> page_files();

/// "NONCE" and "VERSION" stand for a number of each reply and for kPageVersion.
extern const std::string_view kPageIndex;
/// Changes with every file of the page.
extern const std::string_view kPageVersion;

}  // namespace quern
