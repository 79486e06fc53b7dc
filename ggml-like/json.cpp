#include "ggml-like/json.h"

QUERN_JSON(, nlohmann::json)
QUERN_JSON(, nlohmann::ordered_json)
template class nlohmann::basic_json<>;
template class nlohmann::basic_json<nlohmann::ordered_map>;
