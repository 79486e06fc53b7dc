#include "models/model.h"

#include "ggml-like/check.h"

namespace quern {

int64_t StateSpec::bytes() const {
    int64_t elements = 1;
    for (int64_t size : shape) elements *= size;
    return dtype_bytes(dtype, elements);
}

void Model::normed_hidden(Pass, const float*, float*) const { CHECK(false, "[model] there is no MTP layer"); }

}  // namespace quern
