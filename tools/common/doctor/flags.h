// The flags of --doctor, as the command line gives them.
#pragma once

#include <string>

namespace quern {

struct DoctorFlags {
    bool wanted = false, json = false;
    std::string html;  // a file to write the page to; empty: none
};

}  // namespace quern
