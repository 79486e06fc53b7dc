// A rendered prompt as token ids.
#include "models/chat_format.h"
#include "models/tokenizer.h"

namespace quern {

std::string RenderedPrompt::text() const {
    std::string out;
    for (const PromptSegment& segment : segments) out += segment.text;
    return out;
}

std::vector<ImagePtr> RenderedPrompt::images() const {
    std::vector<ImagePtr> list;
    for (const PromptSegment& segment : segments)
        if (segment.image != nullptr) list.push_back(segment.image);
    return list;
}

std::vector<int32_t> encode_prompt(const RenderedPrompt& prompt, const Tokenizer& tokenizer,
                                   std::vector<size_t>* boundaries) {
    std::vector<int32_t> ids;
    std::string pending;
    const auto flush = [&] {
        if (pending.empty()) return;
        const auto more = tokenizer.encode(pending, Tokenizer::Markers::literal);
        ids.insert(ids.end(), more.begin(), more.end());
        pending.clear();
    };
    if (boundaries) boundaries->clear();
    size_t next_boundary = 0;
    for (size_t i = 0; i <= prompt.segments.size(); ++i) {
        // Text on both sides of a boundary would be one text only if a marker had no token: no branch then.
        if (boundaries && next_boundary < prompt.boundaries.size() && prompt.boundaries[next_boundary] == i) {
            ++next_boundary;
            const bool at_marker =
                i == prompt.segments.size() ||
                (prompt.segments[i].control && tokenizer.find_added(prompt.segments[i].text));
            if (at_marker) {
                flush();
                boundaries->push_back(ids.size());
            }
        }
        if (i == prompt.segments.size()) break;
        const PromptSegment& segment = prompt.segments[i];
        if (segment.image != nullptr) {
            flush();
            ids.insert(ids.end(), segment.image->keys.begin(), segment.image->keys.end());
            continue;
        }
        const auto marker = segment.control ? tokenizer.find_added(segment.text) : std::nullopt;
        if (!marker) {
            pending += segment.text;
            continue;
        }
        flush();
        ids.push_back(*marker);
    }
    flush();
    return ids;
}

}  // namespace quern
