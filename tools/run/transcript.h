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
/// Written beside and renamed: the file is the old or the new one, never half. Throws Error(runtime).
void save_transcript(const std::string& path, const std::vector<Message>& messages);
/// Throws Error(usage) naming the file for anything that is not such a transcript.
std::vector<Message> load_transcript(const std::string& path);

/// $XDG_STATE_HOME/quern or ~/.local/state/quern, created with access for its owner only. Empty if there is
/// no home.
std::string state_directory();

}  // namespace quern
