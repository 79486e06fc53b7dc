#include "tools/engine/number_bounds.h"

#include <algorithm>
#include <cmath>

namespace quern {
namespace {

constexpr double kFar = 1e18;  // beyond all numbers of kMaxDigits digits

double power_of_ten(int exponent) { return std::pow(10.0, exponent); }

int64_t floor_multiple(int64_t value, int64_t of) {
    const int64_t rest = value % of;
    return value - (rest < 0 ? rest + of : rest);
}

}  // namespace

bool NumberBounds::holds(const WrittenNumber& n) const {
    if (n.fraction > fraction_digits || (multiple > 0 && (n.fraction > 0 || n.digits % multiple != 0)))
        return false;
    // Both are exact, so the quotient is the double that a parser makes of the text.
    const double size = static_cast<double>(n.digits) / power_of_ten(n.fraction);
    const double value = n.negative ? -size : size;
    return (low_open ? value > low : value >= low) && (high_open ? value < high : value <= high);
}

/// Whether a whole number whose size is in [from, to] fits.
bool NumberBounds::meets_whole(int64_t from, int64_t to, bool negative) const {
    const auto limit = [](double d) { return static_cast<int64_t>(std::clamp(d, -kFar, kFar)); };
    int64_t least = limit(low_open ? std::floor(low) + 1 : std::ceil(low));
    int64_t most = limit(high_open ? std::ceil(high) - 1 : std::floor(high));
    least = std::max(least, negative ? -to : from);
    most = std::min(most, negative ? -from : to);
    if (least > most) return false;
    return multiple <= 1 || floor_multiple(most, multiple) >= least;
}

/// Whether a number whose size is in [from, to) fits.
bool NumberBounds::meets(double from, double to, bool negative) const {
    const double first = negative ? -to : from, last = negative ? -from : to;
    const bool first_open = negative, last_open = !negative;
    const double least = std::max(low, first), most = std::min(high, last);
    if (least != most) return least < most;
    const bool open = (least == low && low_open) || (least == first && first_open) ||
                      (most == high && high_open) || (most == last && last_open);
    return !open;
}

bool NumberBounds::reachable(const WrittenNumber& n, bool integer) const {
    if (n.length > kMaxDigits || n.fraction > fraction_digits) return false;
    const bool whole = whole_only(integer);
    if (n.point) {
        if (whole || (n.length == kMaxDigits && n.fraction == 0)) return false;
        const double unit = power_of_ten(n.fraction);
        const auto digits = static_cast<double>(n.digits);
        return holds(n) || meets(digits / unit, (digits + 1) / unit, n.negative);
    }
    const int more =
        n.digits == 0 && n.length > 0 ? 0 : kMaxDigits - n.length;  // nothing follows a first zero
    int64_t unit = 1;
    for (int k = 0; k <= more; ++k, unit *= 10) {
        const int64_t from = n.digits * unit, to = (n.digits + 1) * unit;
        if (whole ? meets_whole(from, to - 1, n.negative)
                  : meets(static_cast<double>(from), static_cast<double>(to), n.negative))
            return true;
    }
    return false;
}

bool NumberBounds::may_be_negative(bool integer) const {
    for (int64_t digit = 1; digit <= 9; ++digit)
        if (reachable({.digits = digit, .length = 1, .negative = true}, integer)) return true;
    return !whole_only(integer) && meets(0, 1, true) && low < 0;
}

bool NumberBounds::any(bool integer) const {
    for (int64_t digit = 0; digit <= 9; ++digit)
        if (reachable({.digits = digit, .length = 1}, integer)) return true;
    return may_be_negative(integer);
}

}  // namespace quern
