// Conversations on disk: a portable JSON transcript, messages as in the OpenAI API.
#pragma once

#include <string>
#include <vector>

#include "models/chat_format.h"

namespace quern {

/// A name without '/' means a file among the saved chats; anything else is a path.
std::string transcript_path(const std::string& name);
/// Names of the saved chats, sorted.
std::vector<std::string> list_transcripts();
/// The file is replaced whole or stays as it was. Throws Error(runtime).
void save_transcript(const std::string& path, const std::vector<Message>& messages);
/// Throws Error(usage) naming the file if it is not such a transcript.
std::vector<Message> load_transcript(const std::string& path);

/// $XDG_STATE_HOME/quern or ~/.local/state/quern, made with access for its owner only. Empty without a home directory.
std::string state_directory();

}  // namespace quern
