// NumberBounds: which numbers a JSON schema allows, asked digit by digit. Internal to grammar*.cpp.
#pragma once

#include <cstdint>
#include <limits>

namespace quern {

/// A number as far as it is written.
struct WrittenNumber {
    int64_t digits = 0;    // without the point
    uint8_t length = 0;    // of them
    uint8_t fraction = 0;  // digits behind the point
    bool negative = false, point = false;

    bool operator==(const WrittenNumber&) const = default;
};

struct NumberBounds {
    static constexpr int kMaxDigits = 17;

    double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
    bool low_open = false, high_open = false;  // the bound itself is not allowed
    int64_t multiple = 0;                      // of this integer, without a fraction; 0: of none
    int fraction_digits = kMaxDigits;

    bool whole_only(bool integer) const { return integer || multiple > 0 || fraction_digits == 0; }
    /// Whether the number may end here.
    bool holds(const WrittenNumber& n) const;
    /// Whether digits, and unless `integer` a point with digits, may follow so that it can end.
    bool reachable(const WrittenNumber& n, bool integer) const;
    /// Whether a minus may be the first character.
    bool may_be_negative(bool integer) const;
    /// Whether any number fits.
    bool any(bool integer) const;

  private:
    bool meets(double from, double to, bool negative) const;
    bool meets_whole(int64_t from, int64_t to, bool negative) const;
};

}  // namespace quern
