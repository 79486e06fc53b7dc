// nlohmann::json, compiled once, in json.cpp: what reads and writes text and what keeps values cost every other file a second.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#define QUERN_JSON_TEXT(EXTERN, Json, Iterator)                                                              \
    EXTERN template class nlohmann::detail::lexer<Json, nlohmann::detail::iterator_input_adapter<Iterator>>; \
    EXTERN template class nlohmann::detail::parser<Json, nlohmann::detail::iterator_input_adapter<Iterator>>;

#define QUERN_JSON(EXTERN, Json)                              \
    EXTERN template class nlohmann::detail::serializer<Json>; \
    QUERN_JSON_TEXT(EXTERN, Json, const char*)                \
    QUERN_JSON_TEXT(EXTERN, Json, std::string::const_iterator)

QUERN_JSON(extern, nlohmann::json)
QUERN_JSON(extern, nlohmann::ordered_json)
extern template class nlohmann::basic_json<>;
extern template class nlohmann::basic_json<nlohmann::ordered_map>;
