#include "models/model.h"

#include <cmath>

namespace quern {

int64_t WeightUse::bytes() const {
    return matrix != nullptr ? matrix->bytes() : experts != nullptr ? experts->bytes() : vector->bytes();
}

int64_t WeightUse::parameters() const {
    if (matrix != nullptr) return matrix->rows * matrix->cols;
    return experts != nullptr ? experts->count() * experts->rows * experts->cols : vector->elements();
}

double WeightUse::share(int64_t tokens) const {
    if (picked == 0) return 1;
    const auto choices = static_cast<double>(experts != nullptr ? experts->count() : matrix->rows);
    return 1 - std::pow(1 - static_cast<double>(picked) / choices, static_cast<double>(tokens));
}

int64_t StateSpec::bytes() const {
    int64_t elements = 1;
    for (int64_t size : shape) elements *= size;
    return dtype_bytes(dtype, elements);
}

}  // namespace quern
