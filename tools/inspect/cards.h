// Graphics cards by their data sheets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

/// Memory as nvidia-smi shows it; bandwidth of the data sheet, which no program reaches: expect 85 to 93 %.
struct Card {
    const char* name;
    int64_t mebibytes;
    double gigabytes_per_second;
};

/// Those that are planned for if none is named.
std::vector<Card> usual_cards();
/// "rtx-3090", "RTX 3090" and "rtx3090" are the same. Throws Error(usage) that lists the known ones.
Card find_card(const std::string& name);

}  // namespace quern
