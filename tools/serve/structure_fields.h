// The fields of a request that say what form its answer must have.
#pragma once

#include <memory>

#include "tools/common/fields.h"
#include "tools/engine/grammar.h"

namespace quern {

/// From one of: response_format (text, json_object, json_schema), json_schema and grammar (llama.cpp), guided_json,
/// guided_choice, guided_regex, guided_grammar, structured_outputs {json, json_object, choice, regex, grammar} (vLLM), choice,
/// regex. Grammars are GBNF. Null if the answer is free; empty texts, null and false count as absent. Throws FieldError for
/// two of them at once, and for what cannot be understood.
std::shared_ptr<const Grammar> read_structure(Fields& f);

}  // namespace quern
