// Api: the routes that generate text or count its tokens.
#include "ggml-like/check.h"
#include "tools/serve/api.h"
#include "tools/serve/api_error.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

HttpReply Api::chat(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(chat_body(parse(r)), &ignored);
    auto format = openai_format(true, request, *engine_->model().tokenizer());
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::completions(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->completion(chat_body(parse(r)).body, &ignored);
    auto format = openai_format(false, request, *engine_->model().tokenizer());
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::messages(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(chat_from_messages(parse(r)), &ignored);
    auto format = messages_format(request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

struct Api::Asked {
    Body body;
    ordered_json items;  // the input of this request alone
    std::shared_ptr<const ResponseStore::Entry> before;
    ChatBody chat;
};

Api::Asked Api::read_response(const HttpRequest& r) const {
    Asked out{.body = parse(r)};
    Fields f(out.body);
    ordered_json all = ordered_json::array();
    if (const auto id = f.string("previous_response_id"); id && !id->empty()) {
        out.before = store_.find(*id, api_key(r));
        if (out.before == nullptr)
            throw ApiError(404, "previous_response_not_found",
                           "there is no response '" + id->substr(0, 64) +
                               "', or not any more; send the conversation in input",
                           "previous_response_id");
        all = ResponseStore::conversation(*out.before);
    }
    out.items = response_items(out.body);
    for (const ordered_json& item : out.items) all.push_back(item);
    out.chat = chat_from_responses(out.body, all);
    return out;
}

HttpReply Api::responses(const HttpRequest& r) {
    std::vector<std::string> ignored;
    Asked asked = read_response(r);
    GenerationRequest request = reader_->chat(asked.chat, &ignored);
    std::function<void(const ordered_json&)> keep;
    if (Fields(asked.body).boolean("store").value_or(true))
        keep = [this, owner = api_key(r), before = asked.before, items = asked.items](
                   const ordered_json& response) { store_.put(owner, before, items, response); };
    auto format = responses_format(request, asked.body, std::move(keep));
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

namespace {

/// /v1/responses/ID, or with "/input_items" behind it.
struct ResponsePath {
    std::string id;
    bool items = false;

    explicit ResponsePath(std::string path) : id(path.substr(std::string("/v1/responses/").size())) {
        constexpr std::string_view kItems = "/input_items";
        items = id.ends_with(kItems);
        if (items) id.resize(id.size() - kItems.size());
    }
};

ApiError no_response() { return {404, "response_not_found", "there is no such response, or not any more"}; }

}  // namespace

HttpReply Api::stored_response(const HttpRequest& r) {
    const ResponsePath path(r.path);
    const auto found = store_.find(path.id, api_key(r));
    if (found == nullptr) throw no_response();
    if (!path.items) return {.body = found->response};
    ordered_json items = ordered_json::parse(found->items);
    for (size_t i = 0; i < items.size(); ++i)
        if (items[i].is_object() && !items[i].contains("id"))
            items[i]["id"] = found->id + "_" + std::to_string(i);
    const auto id = [&](size_t i) {
        return items.empty() ? ordered_json() : items[i].value("id", ordered_json());
    };
    return {.body = dump({{"object", "list"},
                          {"data", items},
                          {"first_id", id(0)},
                          {"last_id", id(items.size() - 1)},
                          {"has_more", false}})};
}

HttpReply Api::drop_response(const HttpRequest& r) {
    const ResponsePath path(r.path);
    if (!store_.erase(path.id, api_key(r))) throw no_response();
    return {.body = dump({{"id", path.id}, {"object", "response"}, {"deleted", true}})};
}

/// As the usage of the answer will report it.
int64_t Api::input_tokens(const ChatBody& chat) const {
    const GenerationRequest request = reader_->chat(chat, nullptr);
    AnswerReader answer(engine_->model(), request.rules);
    return request.prompt_tokens() + static_cast<int64_t>(answer.opening().size());
}

HttpReply Api::count_tokens(const HttpRequest& r) {
    return {.body = dump({{"input_tokens", input_tokens(chat_from_messages(parse(r)))}})};
}

HttpReply Api::chat_tokens(const HttpRequest& r) {
    return {.body = dump({{"object", "chat.completion.input_tokens"},
                          {"input_tokens", input_tokens(chat_body(parse(r)))}})};
}

HttpReply Api::response_tokens(const HttpRequest& r) {
    return {.body = dump({{"object", "response.input_tokens"},
                          {"input_tokens", input_tokens(read_response(r).chat)}})};
}

}  // namespace quern
