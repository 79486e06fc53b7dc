// The texts that the doctor reads to a model: a few sentences of each kind, written for quern, so that no model has
// seen them. Built in from texts.json.
#pragma once

#include <string>
#include <vector>

namespace quern {

struct DoctorText {
    std::string kind;  // "prose", "code", "German" ...
    std::string text;  // UTF-8
};

const std::vector<DoctorText>& doctor_texts();

}  // namespace quern
