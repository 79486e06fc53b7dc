#include "ggml-like/backend.h"

namespace quern {

void Backend::upload_between(const InputCopy& first, const InputCopy& second) {
    for (const InputCopy& c : {first, second}) upload(c.to, c.from_host, c.bytes);
}

void Backend::save(std::span<const BlockCopy> list) {
    for (const BlockCopy& c : list)
        for (int64_t i = 0; i < c.count; ++i)
            download(c.to + i * c.to_stride, c.from + i * c.from_stride, c.bytes);
}

void Backend::load(std::span<const BlockCopy> list) {
    for (const BlockCopy& c : list)
        for (int64_t i = 0; i < c.count; ++i)
            upload(c.to + i * c.to_stride, c.from + i * c.from_stride, c.bytes);
}

void Backend::receive(Backend& sender, std::span<const BlockCopy> list) {
    sender.synchronize();
    for (const BlockCopy& c : list)
        for (int64_t i = 0; i < c.count; ++i)
            copy(c.to + i * c.to_stride, c.from + i * c.from_stride, c.bytes);
}

}  // namespace quern
