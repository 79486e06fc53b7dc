#include "tools/inspect/cards.h"

#include <algorithm>
#include <cctype>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

constexpr Card kCards[] = {
    {"RTX 5090", 32607, 1792}, {"RTX PRO 6000", 97887, 1792}, {"H100 SXM", 81559, 3350},
    {"H200", 143771, 4800},    {"RTX 3090", 24576, 936},      {"RTX 4090", 24564, 1008},
    {"RTX 5080", 16303, 960},  {"RTX A6000", 49140, 768},     {"RTX 6000 Ada", 49140, 960},
    {"L40S", 46068, 864},      {"A100 40GB", 40960, 1555},    {"A100 80GB", 81920, 2039},
    {"H100 PCIe", 81559, 2000}};
constexpr size_t kUsual = 4;

/// Letters and digits alone, small.
std::string key(const std::string& name) {
    std::string out;
    for (const char c : name)
        if (std::isalnum(static_cast<unsigned char>(c)) != 0)
            out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
}

}  // namespace

std::vector<Card> usual_cards() { return {kCards, kCards + kUsual}; }

Card find_card(const std::string& name) {
    for (const Card& card : kCards)
        if (key(card.name) == key(name)) return card;
    std::string known;
    for (const Card& card : kCards) known += (known.empty() ? "" : ", ") + std::string(card.name);
    FAIL(usage, "--card {}: not known; known are {}. For another one say --bandwidth", printable(name),
         known);
}

}  // namespace quern
