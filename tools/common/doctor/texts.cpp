#include "tools/common/doctor/texts.h"

#include "ggml-like/json.h"

namespace quern {

extern const char* const kDoctorTexts;  // texts.json

const std::vector<DoctorText>& doctor_texts() {
    static const std::vector<DoctorText> list = [] {
        std::vector<DoctorText> texts;
        for (const auto& entry : nlohmann::json::parse(kDoctorTexts))
            texts.push_back({entry.at("kind").get<std::string>(), entry.at("text").get<std::string>()});
        return texts;
    }();
    return list;
}

}  // namespace quern
