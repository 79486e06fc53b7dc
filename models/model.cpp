#include "models/model.h"

namespace quern {

int64_t StateSpec::bytes() const {
    int64_t elements = 1;
    for (int64_t size : shape) elements *= size;
    return dtype_bytes(dtype, elements);
}

}  // namespace quern
