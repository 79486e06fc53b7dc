// The orientation tag of EXIF: a TIFF block, whose first directory has it. Source: TIFF 6.0; CIPA DC-008, tag 0x0112.
#include "tools/common/images/formats.h"

namespace quern {
namespace {

/// Numbers in a block of either byte order; 0 outside of it.
class Tiff {
  public:
    Tiff(FileBytes bytes, bool big) : bytes_(bytes), big_(big) {}
    uint32_t number(size_t at, size_t size) const {
        if (at > bytes_.size() || size > bytes_.size() - at) return 0;
        uint32_t value = 0;
        for (size_t i = 0; i < size; ++i) value = value << 8 | bytes_[at + (big_ ? i : size - 1 - i)];
        return value;
    }

  private:
    FileBytes bytes_;
    bool big_;
};

}  // namespace

int exif_orientation(FileBytes tiff) {
    constexpr uint32_t kTag = 0x0112, kShort = 3, kMagic = 42;
    constexpr size_t kEntry = 12;
    if (tiff.size() < 8 || tiff[0] != tiff[1] || (tiff[0] != 'I' && tiff[0] != 'M')) return 1;
    const Tiff t(tiff, tiff[0] == 'M');
    if (t.number(2, 2) != kMagic) return 1;
    const size_t directory = t.number(4, 4), entries = t.number(directory, 2);
    for (size_t i = 0; i < entries; ++i) {
        const size_t entry = directory + 2 + i * kEntry;
        if (entry + kEntry > tiff.size()) return 1;
        if (t.number(entry, 2) != kTag) continue;
        const uint32_t value = t.number(entry + 8, 2);
        const bool valid =
            t.number(entry + 2, 2) == kShort && t.number(entry + 4, 4) == 1 && value >= 1 && value <= 8;
        return valid ? static_cast<int>(value) : 1;
    }
    return 1;
}

}  // namespace quern
