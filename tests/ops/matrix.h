// A random stacked weight with segments of any forms, and its values in double.
#pragma once

#include "ops/step_rows.h"

namespace quern::test {

struct Matrix {
    Weight weight;
    std::vector<double> values;
};

inline Matrix random_matrix(WeightStore& store, const std::vector<Form>& forms,
                            const std::vector<int64_t>& heights, int64_t cols) {
    Matrix m;
    std::vector<WeightSegment> segments;
    for (size_t i = 0; i < heights.size(); ++i)
        segments.push_back(store.segment(fmt::format("s{}", i), forms[i], heights[i], cols, m.values));
    m.weight = Weight("w", segments);
    return m;
}

/// "bf16 40 + nvfp4 8 of 144", for messages.
inline std::string shape_name(const std::vector<Form>& forms, const std::vector<int64_t>& heights,
                              int64_t cols) {
    std::string name;
    for (size_t i = 0; i < forms.size(); ++i)
        name += fmt::format("{}{} {}", i > 0 ? " + " : "", form_name(forms[i]), heights[i]);
    return name + fmt::format(" of {}", cols);
}

}  // namespace quern::test
